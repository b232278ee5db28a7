"""Reading CIFAR-10 and CIFAR-100: binary files or sheets as bytes, anything else as a sentence with file and remedy."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from evenly.errors import DataError
from evenly.recipes.config import load_config
from evenly.recipes.data import load_images
from evenly.recipes.data.catalogue import CIFAR_FILES, DATASETS
from evenly.recipes.tasks.training import train
from tests.recipes.cifar import write_cifar
from tests.recipes.data.sheets import png, write_sheets

DATA = Path(__file__).parents[3] / "data"


def test_a_folder_of_binary_files(tmp_path):
    data = load_images("cifar10", write_cifar(tmp_path))
    assert (len(data.train), len(data.test), data.classes) == (40, 10, 10)
    assert (data.channels, data.size) == (3, (32, 32))
    assert data.train.labels.tolist() == [label % 10 for label in range(40)]
    image, label, _ = data.train[13]
    assert (image.shape, image.dtype) == ((3, 32, 32), torch.uint8)
    assert (label.dtype, int(label)) == (torch.int64, 3)


def test_planes_rows_and_channels_are_in_their_places(tmp_path):
    pixels = torch.arange(3 * 32 * 32) % 251
    write_cifar(tmp_path)
    (tmp_path / CIFAR_FILES[-1]).write_bytes(bytes([7, *pixels.tolist()]))
    data = load_images("cifar10", tmp_path)
    assert torch.equal(data.test.images[0].long(), pixels.reshape(3, 32, 32))
    assert data.test.labels.tolist() == [7]
    mean, std = (torch.tensor(values).double()[:, None, None] for values in (data.mean, data.std))
    expected = (pixels.reshape(3, 32, 32).double() / 255 - mean) / std
    assert torch.allclose(data.normalised()[1].tensors[0][0].double(), expected, atol=1e-6)


def test_limits_keep_the_first_images(tmp_path):
    write_cifar(tmp_path)
    whole, kept = load_images("cifar10", tmp_path), load_images("cifar10", tmp_path, train_limit=19, test_limit=3)
    assert (len(kept.train), len(kept.test)) == (19, 3)
    assert torch.equal(kept.train.images, whole.train.images[:19])
    assert torch.equal(kept.test.labels, whole.test.labels[:3])
    assert len(load_images("cifar10", tmp_path, train_limit=1000).train) == 40


def test_the_folder_that_the_published_archive_makes_is_found_inside(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-bin")
    assert len(load_images("cifar10", tmp_path).train) == 40


@pytest.mark.parametrize("lost", [CIFAR_FILES[0], CIFAR_FILES[4], CIFAR_FILES[5]])
def test_a_missing_file_is_named_with_the_way_to_get_it(tmp_path, lost):
    (write_cifar(tmp_path) / lost).unlink()
    with pytest.raises(DataError) as caught:
        load_images("cifar10", tmp_path, train_limit=1)
    for words in ("CIFAR-10 was asked for", f"no {lost} in {tmp_path}", "evenly data fetch cifar10", "data/cifar10"):
        assert words in str(caught.value)


@pytest.mark.parametrize("name", [CIFAR_FILES[2], CIFAR_FILES[5]])
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda raw: raw[:-1], r"has \d+ bytes, not whole records of 3073"),
        (lambda raw: raw + b"\0", r"has \d+ bytes, not whole records of 3073"),
        (lambda raw: b"", "has 0 bytes, not whole records of 3073"),
        (lambda raw: raw[:3073] + b"\x0a" + raw[3074:], "gives record 1 the label 10, not 0 to 9"),
        (lambda raw: b"\xff" + raw[1:], "gives record 0 the label 255, not 0 to 9"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, name, damage, told):
    path = write_cifar(tmp_path) / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=rf"CIFAR-10 was asked for, but {path} {told}\. Fetch the file again"):
        load_images("cifar10", tmp_path, train_limit=1)


def test_a_whole_file_with_another_checksum_is_refused(tmp_path):
    write_cifar(tmp_path)
    (tmp_path / CIFAR_FILES[5]).write_bytes(bytes(30_730_000))
    with pytest.raises(DataError, match=r"test_batch\.bin has the md5 sum \w+, not 803d5f7f"):
        load_images("cifar10", tmp_path)


def write_cifar100(folder: Path) -> Path:
    for name, count in (("train.bin", 12), ("test.bin", 5)):
        labels = np.stack([np.arange(count) % 20, 99 - np.arange(count)], 1)
        images = np.random.default_rng(count).integers(256, size=(count, 3072))
        (folder / name).write_bytes(np.hstack([labels, images]).astype(np.uint8).tobytes())
    return folder


def test_the_class_of_cifar100_is_the_second_byte(tmp_path):
    data = load_images("cifar100", write_cifar100(tmp_path))
    assert (len(data.train), len(data.test), data.classes) == (12, 5, 100)
    assert data.train.labels.tolist() == [99 - index for index in range(12)]
    raw = (tmp_path / "test.bin").read_bytes()
    assert bytes(data.test.images[1].flatten().tolist()) == raw[3074 + 2 : 2 * 3074]


@pytest.mark.parametrize(("byte", "told"), [(0, "label 20, not 0 to 19"), (1, "label 100, not 0 to 99")])
def test_labels_of_cifar100_out_of_range_are_refused(tmp_path, byte, told):
    path = write_cifar100(tmp_path) / "train.bin"
    raw = bytearray(path.read_bytes())
    raw[3074 + byte] = 20 if byte == 0 else 100
    path.write_bytes(raw)
    with pytest.raises(DataError, match=rf"CIFAR-100 .* gives record 1 the {told}"):
        load_images("cifar100", tmp_path)


def test_sheets_are_the_same_images(tmp_path):
    binary = load_images("cifar10", write_cifar(tmp_path / "binary"))
    sheets = load_images("cifar10", write_sheets(tmp_path / "binary", tmp_path / "sheets"))
    for part in ("train", "test"):
        assert torch.equal(getattr(sheets, part).images, getattr(binary, part).images)
        assert torch.equal(getattr(sheets, part).labels, getattr(binary, part).labels)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("train_lables.json", json.dumps([1] * 39), "40 images and 39 labels"),
        ("train_lables.json", json.dumps([1] * 39 + [10]), "a label is 10, not 0 to 9"),
        ("test_lables.json", "[1, ", "Expecting value"),
        ("test_lables.json", "{}", "labels are not a list"),
        ("data_batch_3.png", "GIF89a", "not a PNG file"),
        ("data_batch_3.png", png(np.zeros((4, 7, 3), np.uint8), [0] * 4), r"\[4, 7, 3\] is not \[n, 1024, 3\]"),
        ("data_batch_3.png", None, "No such file"),
    ],
)
def test_damaged_sheets_are_refused(tmp_path, file, content, told):
    write_cifar(tmp_path / "binary")
    path = write_sheets(tmp_path / "binary", tmp_path / "sheets") / file
    path.unlink()
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=rf"CIFAR-10 .* cannot be read: .*{told}.* Fetch them again"):
        load_images("cifar10", tmp_path / "sheets")


@pytest.mark.skipif(
    not (DATA / "cifar10").is_dir(), reason=f"The real images are not in {DATA}: evenly data fetch cifar10."
)
def test_the_real_things():
    data = load_images("cifar10", DATA / "cifar10")
    assert (len(data.train), len(data.test)) == (50_000, 10_000)
    assert torch.bincount(data.train.labels).tolist() == [5000] * 10
    mean = data.train.images.sum((0, 2, 3), dtype=torch.int64) / (255 * 50_000 * 1024)
    assert (mean - torch.tensor(data.mean)).abs().max() < 1e-4
    some = data.normalise(data.train.images[::10])
    assert (some.std((0, 2, 3)) - 1).abs().max() < 1e-2


@pytest.mark.parametrize(("case", "name"), [("cifar", "cifar10"), ("mnist", "mnist")])
def test_a_recipe_without_data_says_how_to_get_them(tmp_path, monkeypatch, case, name):
    monkeypatch.chdir(tmp_path)
    title = DATASETS[name].title
    with pytest.raises(DataError, match=rf"{title} .* no folder data/{name}\. Fetch it \(evenly data fetch {name}\)"):
        train(load_config(case))
