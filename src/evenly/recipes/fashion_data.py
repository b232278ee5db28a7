"""Fashion-MNIST: 60000 training and 10000 test images of 28 x 28, ten kinds of clothing."""

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from evenly._errors import DataError
from evenly.recipes.idx import read_idx

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
MEAN, STD = 0.2860, 0.3530


def load_fashion(folder: Path | None = None, *, limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Returns the training and the test set, normalised; `limit` keeps the first images of the training set."""
    train, test = _pair("train", folder), _pair("t10k", folder)
    if limit is not None:
        train = (train[0][:limit], train[1][:limit])
    return TensorDataset(*train), TensorDataset(*test)


def _pair(part: str, folder: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    images = read_idx(_find(f"{part}-images-idx3-ubyte", folder))
    labels = read_idx(_find(f"{part}-labels-idx1-ubyte", folder))
    if images.ndim != 3 or images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise DataError(
            f"the {part} files hold images {list(images.shape)} and labels {list(labels.shape)}, not [n, 28, 28], [n]. "
            "Give the folder of Fashion-MNIST."
        )
    return (images[:, None].float() / 255 - MEAN) / STD, labels.long()


def _find(name: str, folder: Path | None) -> Path:
    where = folder or DEBIAN
    for candidate in (where / f"{name}.gz", where / name):
        if candidate.is_file():
            return candidate
    raise DataError(
        f"Fashion-MNIST was asked for, but there is no {name}(.gz) in {where}. Either install Debian's package "
        "(apt-get install dataset-fashion-mnist), or pass --data DIR with the four idx files."
    )
