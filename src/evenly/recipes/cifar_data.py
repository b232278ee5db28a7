"""CIFAR-10: 50000 training and 10000 test images of 3 x 32 x 32, ten kinds of things, in the binary version's files.

A file is a row of records: one byte for the label, then the red, the green and the blue plane of 32 x 32 bytes.

Reference: Krizhevsky, *Learning multiple layers of features from tiny images*, 2009.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from evenly.errors import DataError

TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_CLASSES, _RECORD_BYTES = 10, 1 + 3 * 32 * 32


def load_cifar10(folder: Path, *, limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Returns the training and the test set, normalised; `limit` keeps the first images of the training set."""
    train, test = _read(folder, TRAIN), _read(folder, TEST)
    return _normalised(train[:limit]), _normalised(test)


def _read(folder: Path, names: Sequence[str]) -> torch.Tensor:
    for name in names:
        if not (folder / name).is_file():
            raise DataError(
                f"CIFAR-10 was asked for, but there is no {name} in {folder}. Fetch it (python scripts/fetch-data.py "
                "--to data) and give data/cifar10, or a folder with the six files of the binary version."
            )
    return torch.cat([_records(folder / name) for name in names])


def _records(path: Path) -> torch.Tensor:
    """Returns the whole records [n, 3073] of one file."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from None
    if not raw or len(raw) % _RECORD_BYTES:
        raise _refused(path, f"has {len(raw)} bytes, not whole records of {_RECORD_BYTES}")
    records = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(-1, _RECORD_BYTES)
    wrong = (records[:, 0] >= _CLASSES).nonzero()
    if len(wrong):
        record = int(wrong[0])
        raise _refused(path, f"gives record {record} the label {int(records[record, 0])}, not 0 to {_CLASSES - 1}")
    return records


def _refused(path: Path, reason: str) -> DataError:
    return DataError(
        f"CIFAR-10 was asked for, but {path} {reason}. "
        "Fetch the file again, and take the binary version, not the Python or Matlab one."
    )


def _normalised(records: torch.Tensor) -> TensorDataset:
    images = records[:, 1:].reshape(-1, 3, 32, 32).float()
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))  # [3, 1, 1]
    # In place: the training set takes 0.6 GB.
    return TensorDataset(images.div_(255).sub_(mean).div_(std), records[:, 0].long())
