"""Small image files in the layouts of the published sets."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_picture(path: Path, *, seed: int = 0, size: tuple[int, int] = (30, 24)) -> Path:
    """Writes an image of random colours; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(256, size=(size[1] // 3, size[0] // 3, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size).save(path)
    return path


def write_class_folders(folder: Path, *, test: str = "test", suffix: str = "png", train: int = 3) -> Path:
    """Writes `train` training images and two test images of each of three classes; returns the folder."""
    for part, count in (("train", train), (test, 2)):
        for number, label in enumerate(("ant", "bee", "cat")):
            for index in range(count):
                write_picture(folder / part / label / f"{label}_{index}.{suffix}", seed=10 * number + index)
    return folder


def write_birds(folder: Path) -> Path:
    """Writes six images of two classes in the layout of CUB-200-2011, every third one for testing."""
    names = [f"{label:03d}.Bird_{label}/bird_{label}_{index}.jpg" for label in (1, 2) for index in range(3)]
    for seed, name in enumerate(names):
        write_picture(folder / "images" / name, seed=seed)
    lines = {
        "images.txt": [f"{number} {name}" for number, name in enumerate(names, start=1)],
        "image_class_labels.txt": [f"{number} {1 + (number > 3)}" for number in range(1, 7)],
        "train_test_split.txt": [f"{number} {int(number % 3 != 0)}" for number in range(1, 7)],
        "classes.txt": ["1 001.Bird_1", "2 002.Bird_2"],
    }
    for file, text in lines.items():
        (folder / file).write_text("\n".join(text) + "\n")
    return folder


def write_aircraft(folder: Path) -> Path:
    """Writes five images of two variants in the layout of FGVC-Aircraft."""
    variants = {"0034309": "737-700", "0034958": "Cessna 172", "0037511": "737-700", "0037512": "Cessna 172"}
    for seed, name in enumerate((*variants, "0062765")):
        write_picture(folder / "data" / "images" / f"{name}.jpg", seed=seed)
    (folder / "data" / "variants.txt").write_text("737-700\nCessna 172\n")
    lines = "".join(f"{name} {variant}\n" for name, variant in variants.items())
    (folder / "data" / "images_variant_trainval.txt").write_text(lines)
    (folder / "data" / "images_variant_test.txt").write_text("0062765 Cessna 172\n")
    return folder
