"""MNIST: 60000 training and 10000 test images of 28 x 28, ten handwritten digits."""

from pathlib import Path

from torch.utils.data import TensorDataset

from evenly.recipes.idx import load_grey

MEAN, STD = 0.1307, 0.3081
_REMEDY = "Fetch it (python scripts/fetch-data.py --to data) and give data/mnist, or a folder with the four idx files."


def load_mnist(folder: Path, *, limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Returns the training and the test set, normalised; `limit` keeps the first images of the training set."""
    return load_grey(folder, name="MNIST", mean=MEAN, std=STD, remedy=_REMEDY, limit=limit)
