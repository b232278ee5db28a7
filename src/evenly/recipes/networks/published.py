"""The networks of the published cases of heterogeneous model parallelism: pairs of convolutions, then two layers.

The two convolutions of a pair are what the method calls *partitioned* and *reduced*.

Reference: Moreno-Álvarez, Haut, Paoletti, Rico-Gallego, *Heterogeneous model parallelism for deep neural networks*,
Neurocomputing 441, 2021.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from evenly.errors import SpecError


class PublishedCifarNet(nn.Sequential):
    """Logits [n, classes] of images [n, channels, size, size], by eight convolutions; 4,612,566 parameters."""

    def __init__(
        self,
        filters: Sequence[int] = (60, 60, 120, 120, 240, 240, 480, 480),
        *,
        hidden: int = 256,
        classes: int = 10,
        dropout: float = 0.0,
        channels: int = 3,
        size: int = 32,
    ) -> None:
        super().__init__(_parts(size, filters, hidden=hidden, classes=classes, dropout=dropout, channels=channels))


class PublishedMnistNet(nn.Sequential):
    """Logits [n, classes] of images [n, channels, size, size], by four convolutions; 434,888 parameters."""

    def __init__(
        self,
        filters: Sequence[int] = (30, 30, 60, 60),
        *,
        hidden: int = 128,
        classes: int = 10,
        dropout: float = 0.0,
        channels: int = 1,
        size: int = 28,
    ) -> None:
        super().__init__(_parts(size, filters, hidden=hidden, classes=classes, dropout=dropout, channels=channels))


def _parts(
    side: int, filters: Sequence[int], *, hidden: int, classes: int, dropout: float, channels: int
) -> OrderedDict[str, nn.Module]:
    """Returns the stages, each of which halves the side, and the head."""
    pairs = list(zip(filters[::2], filters[1::2], strict=False))
    if not pairs or len(filters) % 2 or side >> len(pairs) == 0:
        raise SpecError(
            f"a network for images of {side} x {side} was asked for with filters {tuple(filters)}, but filters come in "
            f"1 to {side.bit_length() - 1} pairs, each of which halves the side. Give the counts pair by pair."
        )
    stages, inputs = [], channels
    for first, second in pairs:
        stages.append(_stage(inputs, first, second))
        inputs, side = second, side // 2
    head = _head(inputs * side * side, hidden, classes, dropout)
    return OrderedDict[str, nn.Module](stages=nn.Sequential(*stages), head=head)


def _stage(inputs: int, first: int, second: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, first, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def _head(inputs: int, hidden: int, classes: int, dropout: float) -> nn.Sequential:
    layers = OrderedDict[str, nn.Module](flatten=nn.Flatten(), hidden=nn.Linear(inputs, hidden), relu=nn.ReLU())
    if dropout:  # the layers have names, so that parameters are called the same with and without it
        layers["dropout"] = nn.Dropout(dropout)
    layers["classes"] = nn.Linear(hidden, classes)
    return nn.Sequential(layers)
