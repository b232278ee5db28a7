"""A name and a folder -> `ImageData`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from evenly.errors import DataError, SpecError
from evenly.recipes.data.catalogue import CIFAR_FILES, SHEET_FILES, DatasetInfo, dataset_info, find_folder
from evenly.recipes.data.checking import require_known_content
from evenly.recipes.data.image_files import FileImageSet, readable, refuse_unreadable
from evenly.recipes.data.readers.cifar import read_records, read_sheets
from evenly.recipes.data.readers.digits import draw_digits
from evenly.recipes.data.readers.idx import read_pair
from evenly.recipes.data.readers.layouts import Labelled, list_images
from evenly.recipes.data.sets import ImageData, ImageSet

FILE_IMAGE_SIZE = 224  # of image files, where no other is asked for
RESIZED_AT_ONCE = 4096  # images
Arrays = tuple[NDArray[np.uint8], NDArray[np.integer]]


def load_images(
    name: str,
    folder: Path | None,
    *,
    train_limit: int | None = None,
    test_limit: int | None = None,
    size: int | None = None,
    skip_unreadable: bool = False,
) -> ImageData:
    """Returns a data set of images; raises `DataError` where its files are missing or not whole.

    Args:
        name: One of `DATASETS`.
        folder: Of its files; None: data/<name>, or where a system package puts them.
        train_limit: Keeps so many training images: the first ones; of image files, some of each class.
        test_limit: Keeps so many test images.
        size: Height and width; None: as the files have them, and 224 for image files of all sizes.
        skip_unreadable: Leaves out image files that cannot be decoded, for which all are decoded once; they are named
            in the log and in `ImageData.skipped`.
    """
    info = dataset_info(name)
    _check_arguments(info, train_limit=train_limit, test_limit=test_limit, size=size)
    read = _IN_MEMORY.get(name)
    if read is None:
        listed = list_images(name, find_folder(name, folder), title=info.title)
        entries = [_spread(listed.train, train_limit), _spread(listed.test, test_limit)]
        return _file_images(info, len(listed.classes), entries, size or FILE_IMAGE_SIZE, skip_unreadable)
    if name == "digits" and folder is not None:
        raise DataError(f"{info.title} were to be read from {folder}, but they have no files. {info.get}")
    parts = read(info, Path() if name == "digits" else find_folder(name, folder))
    train, test = (_image_set(part, limit, size) for part, limit in zip(parts, (train_limit, test_limit), strict=True))
    return ImageData(name, train, test, info.classes or 0, info.mean, info.std)


def _check_arguments(info: DatasetInfo, **numbers: int | None) -> None:
    if info.kind != "images":
        raise SpecError(f"images of {info.name!r} were asked for, but it is {info.kind}. Use load_text.")
    for argument, value in numbers.items():
        if value is not None and value < 1:
            raise SpecError(
                f"{argument}={value} was given for {info.title}; it is at least 1. Give 1 or more, or None."
            )


def _read_idx(info: DatasetInfo, folder: Path) -> list[Arrays]:
    verify = require_known_content(info)
    pairs = (
        read_pair(folder, part, title=info.title, get=info.get, classes=info.classes or 0, verify=verify)
        for part in ("train", "t10k")
    )
    return [(images, labels) for images, labels in pairs]


def _read_cifar10(info: DatasetInfo, folder: Path) -> list[Arrays]:
    if not (folder / CIFAR_FILES[0]).exists() and (folder / SHEET_FILES[0]).exists():
        parts = ((SHEET_FILES[:5], SHEET_FILES[6]), (SHEET_FILES[5:6], SHEET_FILES[7]))
        return [read_sheets(folder, sheets, labels, title=info.title, classes=10) for sheets, labels in parts]
    return _read_binary(info, folder, (CIFAR_FILES[:5], CIFAR_FILES[5:]), (10,))


def _read_cifar100(info: DatasetInfo, folder: Path) -> list[Arrays]:
    return _read_binary(info, folder, (["train.bin"], ["test.bin"]), (20, 100))


def _read_binary(
    info: DatasetInfo, folder: Path, parts: Sequence[Sequence[str]], label_ranges: Sequence[int]
) -> list[Arrays]:
    verify = require_known_content(info)
    return [
        read_records(folder, files, title=info.title, get=info.get, label_ranges=label_ranges, verify=verify)
        for files in parts
    ]


def _draw_digits(info: DatasetInfo, folder: Path) -> list[Arrays]:
    return [draw_digits(count, seed=seed) for seed, count in enumerate(info.counts or ())]


_IN_MEMORY: dict[str, Callable[[DatasetInfo, Path], list[Arrays]]] = {
    "mnist": _read_idx,
    "fashion": _read_idx,
    "cifar10": _read_cifar10,
    "cifar100": _read_cifar100,
    "digits": _draw_digits,
}


def _image_set(arrays: Arrays, limit: int | None, size: int | None) -> ImageSet:
    images, labels = (torch.from_numpy(array[:limit]) for array in arrays)
    return ImageSet(images if size is None else _resized(images, size), labels.long())


def _resized(images: Tensor, size: int) -> Tensor:
    """Returns images [n, c, size, size], each pixel a weighted mean of those it covers."""
    if images.shape[2:] == (size, size):
        return images
    parts = [
        interpolate(part.float(), (size, size), mode="bilinear", antialias=True).round_().clamp_(0, 255).byte()
        for part in torch.split(images, RESIZED_AT_ONCE)
    ]
    return torch.cat(parts)


def _spread(entries: Sequence[Labelled], limit: int | None) -> list[Labelled]:
    """Returns so many entries, equally far from each other: lists are sorted by class."""
    count = min(limit or len(entries), len(entries))
    return [entries[position * len(entries) // count] for position in range(count)]


def _file_images(
    info: DatasetInfo, classes: int, entries: list[list[Labelled]], size: int, skip_unreadable: bool
) -> ImageData:
    paths = [path for part in entries for path, _ in part]
    skipped: list[Path] = []
    if skip_unreadable:
        is_readable = dict(zip(paths, readable(paths), strict=True))
        skipped = [path for path in paths if not is_readable[path]]
        entries = [_without(info, part, is_readable) for part in entries]
    else:
        refuse_unreadable(paths, thorough=False)
    train, test = (
        FileImageSet([path for path, _ in part], torch.tensor([label for _, label in part]), size=size)
        for part in entries
    )
    return ImageData(info.name, train, test, classes, info.mean, info.std, tuple(skipped))


def _without(info: DatasetInfo, part: list[Labelled], is_readable: dict[Path, bool]) -> list[Labelled]:
    """Returns the entries that can be read; raises `DataError` if a class loses all of its images."""
    kept = [(path, label) for path, label in part if is_readable[path]]
    for path, label in part:
        if not is_readable[path] and label not in {label for _, label in kept}:
            raise DataError(
                f"{info.title} was to be read without its unreadable images, but then no image is left of the class of "
                f"{path}. Replace that file."
            )
    return kept
