"""Fashion-MNIST: 60000 training and 10000 test images of 28 x 28, ten kinds of clothing."""

from pathlib import Path

from torch.utils.data import TensorDataset

from evenly.recipes.idx import load_grey

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
MEAN, STD = 0.2860, 0.3530
_REMEDY = (
    "Either install Debian's package (apt-get install dataset-fashion-mnist), "
    "or pass --data DIR with the four idx files."
)


def load_fashion(folder: Path | None = None, *, limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Returns the training and the test set, normalised; `limit` keeps the first images of the training set."""
    return load_grey(folder or DEBIAN, name="Fashion-MNIST", mean=MEAN, std=STD, remedy=_REMEDY, limit=limit)
