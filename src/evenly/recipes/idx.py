"""The idx files of MNIST and its relatives."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from evenly.errors import DataError

_TYPES = {8: torch.uint8}
_CLASSES = 10


def load_grey(
    folder: Path, *, name: str, mean: float, std: float, remedy: str, limit: int | None = None
) -> tuple[TensorDataset, TensorDataset]:
    """Returns the training and the test set of the four idx files in `folder`, normalised by `mean` and `std`.

    Args:
        folder: Where the files are, packed by gzip or not.
        name: What errors call the data.
        mean: Of all pixels of the training set, black being 0 and white 1.
        std: Their standard deviation.
        remedy: The sentence that says where to get a missing file.
        limit: Keeps the first images of the training set.
    """
    train, test = (_read_part(folder, part, name=name, remedy=remedy) for part in ("train", "t10k"))
    parts = ((tensor[:limit] for tensor in train), test)
    train_set, test_set = (
        TensorDataset((images[:, None].float() / 255 - mean) / std, labels.long()) for images, labels in parts
    )
    return train_set, test_set


def read_idx(path: Path) -> torch.Tensor:
    """Returns the array in an idx file, packed by gzip or not; raises `DataError` where the file is not whole."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, str(error)) from None
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES:
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
    return torch.frombuffer(bytearray(raw[header:]), dtype=_TYPES[raw[2]]).reshape(shape)


def _read_part(folder: Path, part: str, *, name: str, remedy: str) -> tuple[torch.Tensor, torch.Tensor]:
    images = read_idx(_find(folder, f"{part}-images-idx3-ubyte", name=name, remedy=remedy))
    labels = read_idx(_find(folder, f"{part}-labels-idx1-ubyte", name=name, remedy=remedy))
    if images.ndim != 3 or images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise DataError(
            f"{name} was asked for, but in {folder} the {part} files hold images {list(images.shape)} and labels "
            f"{list(labels.shape)}, not [n, 28, 28], [n]. Give the folder of {name}."
        )
    if int(labels.max()) >= _CLASSES:
        raise DataError(
            f"{name} was asked for, but in {folder} the {part} labels go up to {int(labels.max())}, "
            f"not {_CLASSES - 1}. Give the folder of {name}."
        )
    return images, labels


def _find(folder: Path, file: str, *, name: str, remedy: str) -> Path:
    for candidate in (folder / f"{file}.gz", folder / file):
        if candidate.is_file():
            return candidate
    raise DataError(f"{name} was asked for, but there is no {file}(.gz) in {folder}. {remedy}")


def _unreadable(path: Path, reason: str) -> DataError:
    return DataError(f"{path} cannot be read as an idx file: {reason}. Fetch the file again.")
