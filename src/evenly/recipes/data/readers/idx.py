"""The idx files of MNIST and its relatives -> arrays of bytes."""

import gzip
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenly.errors import DataError

_BYTES = 8  # the code of the type
Verify = Callable[[Path, bytes | bytearray], None]


def read_pair(
    folder: Path, part: str, *, title: str, get: str, classes: int, verify: Verify | None = None
) -> tuple[NDArray[np.uint8], ...]:
    """Returns images [n, 1, h, w] and labels [n] of a part, train or t10k; raises `DataError` where they do not fit.

    `verify` is called with the path and the unpacked bytes of each whole file.
    """
    images, labels = (
        read_idx(find_file(folder, f"{part}-{kind}-ubyte", title=title, get=get), verify=verify)
        for kind in ("images-idx3", "labels-idx1")
    )
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{title} was asked for, but in {folder} the {part} files hold images {list(images.shape)} and labels "
            f"{list(labels.shape)}, not [n, h, w], [n]. Give the folder of {title}."
        )
    if int(labels.max()) >= classes:
        raise DataError(
            f"{title} was asked for, but in {folder} the {part} labels go up to {int(labels.max())}, "
            f"not {classes - 1}. Give the folder of {title}."
        )
    return images[:, None], labels


def read_idx(path: Path, *, verify: Verify | None = None) -> NDArray[np.uint8]:
    """Returns the array in an idx file, packed by gzip or not; raises `DataError` where the file is not whole."""
    raw = unpacked(path)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != _BYTES:
        raise _unreadable(path, "it does not begin like an idx file of bytes")
    dims = raw[3]
    header = 4 + 4 * dims
    if len(raw) < header:
        raise _unreadable(path, "its header is cut short")
    shape = struct.unpack(f">{dims}I", raw[4:header])
    if len(raw) - header != math.prod(shape):
        raise _unreadable(path, f"it should hold {math.prod(shape)} bytes for {shape} but holds {len(raw) - header}")
    if not math.prod(shape):
        raise _unreadable(path, f"it holds nothing: {shape}")
    if verify is not None:
        verify(path, raw)
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def unpacked(path: Path) -> bytearray:
    """Returns the bytes of a file, unpacked where its name ends in .gz."""
    try:
        return bytearray(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, str(error)) from None


def count_items(path: Path) -> int:
    """Returns how many items the header of an idx file promises; 0 where there is no such header."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(8)
    except (OSError, EOFError, zlib.error):
        return 0
    return int(struct.unpack(">I", head[4:])[0]) if len(head) == 8 and head[:3] == bytes([0, 0, _BYTES]) else 0


def find_file(folder: Path, file: str, *, title: str, get: str) -> Path:
    """Returns the path of a file, packed or not; raises `DataError` if there is none."""
    for candidate in (folder / f"{file}.gz", folder / file):
        if candidate.is_file():
            return candidate
    raise DataError(f"{title} was asked for, but there is no {file}(.gz) in {folder}. {get}")


def _unreadable(path: Path, reason: str) -> DataError:
    return DataError(f"{path} cannot be read as an idx file: {reason}. Fetch the file again.")
