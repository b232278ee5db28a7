"""What of a data set is there: counts without reading it whole, and checksums. No torch."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evenly.errors import DataError
from evenly.recipes.data.catalogue import IDX_FILES, ROOT, DatasetInfo, dataset_info, find_folder
from evenly.recipes.data.readers.cifar import PIXEL_BYTES
from evenly.recipes.data.readers.idx import Verify, count_items, find_file, unpacked
from evenly.recipes.data.readers.layouts import list_images
from evenly.recipes.data.text_files import find_text


def md5_of(content: bytes | bytearray) -> str:
    """Returns the md5 sum as 32 hexadecimal digits."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def require_known_content(info: DatasetInfo) -> Verify:
    """Returns a function of a path and its unpacked bytes that raises `DataError` for damaged or other files.

    It looks at files of the published size only: fewer images in the same form are a choice.
    """

    def verify(path: Path, content: bytes | bytearray) -> None:
        name = path.name.removesuffix(".gz")
        if info.size_bytes.get(name) == len(content) and md5_of(content) != info.md5[name]:
            raise other_checksum(info, path, md5_of(content))

    return verify


def other_checksum(info: DatasetInfo, path: Path, found: str) -> DataError:
    """Returns the error for a file that is not the published one."""
    name = path.name.removesuffix(".gz")
    return DataError(
        f"{info.title} was asked for, but {path} has the md5 sum {found}, not {info.md5[name]}: it is damaged, or of "
        f"another data set. {info.get}"
    )


@dataclass(frozen=True)
class FoundData:
    """What of a data set is in a folder; without a folder it was not found."""

    folder: Path | None
    counts: tuple[int, int] | None = None  # samples to train and to test with; of a text its bytes and 0
    problem: str = ""  # why it cannot be read, where that shows without reading all of it

    def is_whole(self, info: DatasetInfo) -> bool | None:
        """Returns whether all published samples are there; None if there is no such number."""
        if self.folder is None or self.problem:
            return False
        return None if info.counts is None else self.counts == info.counts


def look_for(name: str, folder: Path | None = None, *, root: Path = ROOT) -> FoundData:
    """Returns where a data set is and how much of it, from names, sizes and headers of files."""
    info = dataset_info(name)
    if not info.files:
        return FoundData(Path(), info.counts)
    try:
        place = find_folder(name, folder, root=root)
    except DataError as error:
        return FoundData(None, problem=str(error))
    try:
        return FoundData(place, _counts(info, place))
    except DataError as error:
        return FoundData(place, problem=str(error))
    except OSError as error:
        return FoundData(place, problem=f"{place} cannot be read: {error.strerror}.")


def _counts(info: DatasetInfo, folder: Path) -> tuple[int, int]:
    if info.kind == "text":
        return find_text(info, folder).stat().st_size, 0
    if info.files == (IDX_FILES,):
        files = [find_file(folder, file, title=info.title, get=info.get) for file in IDX_FILES]
        train, _, test, _ = map(count_items, files)
        return train, test
    if info.name.startswith("cifar"):
        return _cifar_counts(info, folder)
    listing = list_images(info.name, folder, title=info.title)
    return len(listing.train), len(listing.test)


def _cifar_counts(info: DatasetInfo, folder: Path) -> tuple[int, int]:
    form = next((names for names in info.files if all((folder / name).is_file() for name in names)), None)
    if form is None:
        missing = next(name for name in info.files[0] if not (folder / name).is_file())
        raise DataError(f"{info.title} was asked for, but there is no {missing} in {folder}. {info.get}")
    if form[0].endswith(".png"):
        return _sheet_counts(folder, form)
    record = PIXEL_BYTES + (2 if info.name == "cifar100" else 1)
    counts = [(folder / name).stat().st_size // record for name in form]
    return sum(counts[:-1]), counts[-1]


def _sheet_counts(folder: Path, form: tuple[str, ...]) -> tuple[int, int]:
    """Returns the heights of the sheets, which are the numbers of their images."""
    heads = [(folder / name).open("rb") for name in form[:6]]
    heights = []
    for file in heads:
        with file:
            heights.append(int.from_bytes(file.read(24)[20:24], "big"))
    return sum(heights[:5]), heights[5]


def check_data(name: str, folder: Path | None = None, *, root: Path = ROOT) -> Iterator[str]:
    """Yields a line for each thing of a data set that was found right; raises `DataError` for the first wrong one."""
    info = dataset_info(name)
    if not info.files:
        yield f"{info.title}: there are no files to check"
        return
    place = find_folder(name, folder, root=root)
    yield from _check_sums(info, place)
    found = look_for(name, place)
    if found.problem:
        raise DataError(found.problem)
    yield from _check_images(info, place)
    yield f"{place}: {counts_in_words(info, found)}"


def _check_sums(info: DatasetInfo, folder: Path) -> Iterator[str]:
    known = [file for file in info.md5 if (folder / file).exists() or (folder / f"{file}.gz").exists()]
    if not known:
        yield f"{info.title}: no checksum is known of these files"
    for file in info.md5 if known else ():
        path = find_file(folder, file, title=info.title, get=info.get)
        found = md5_of(unpacked(path))
        if found != info.md5[file]:
            raise other_checksum(info, path, found)
        yield f"{path}: md5 {found}, as published"


def _check_images(info: DatasetInfo, folder: Path) -> Iterator[str]:
    """Decodes all image files."""
    if info.kind == "text" or info.files == (IDX_FILES,) or info.name.startswith("cifar"):
        return
    from evenly.recipes.data.image_files import refuse_unreadable

    listing = list_images(info.name, folder, title=info.title)
    refuse_unreadable([path for path, _ in (*listing.train, *listing.test)], thorough=True)
    yield f"{folder}: every image can be read"


def counts_in_words(info: DatasetInfo, found: FoundData) -> str:
    """Returns how much of a data set is there."""
    if found.counts is None:
        return "-"
    if info.kind == "text":
        is_whole = found.counts[0] in info.size_bytes.values()
        return f"{'whole: ' if is_whole else ''}{found.counts[0] / 1e6:.1f} MB"
    words = f"{found.counts[0]} + {found.counts[1]}"
    if info.counts is None:
        return words
    whole = f"{info.counts[0]} + {info.counts[1]}"
    return f"whole: {words}" if found.counts == info.counts else f"{words} of {whole}"
