"""Networks as users write them, good and bad ones; tests name them as `tests/cli/networks.py:NAME`."""

import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(x))


class Pair(Tiny):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x + y)))


class Choosy(Tiny):
    """Looks at its parameters when it is made, which has no meaning on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        if float(self.first.weight.detach().sum()) > 1e9:
            raise RuntimeError("too large")


class Flat(Tiny):
    """Gives out classes, through which no gradient flows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).argmax(1)


def number() -> int:
    return 3


def broken() -> nn.Module:
    raise RuntimeError("no weights\nhere")


def needy(width: int) -> nn.Module:
    return nn.Linear(width, width)


constant = 5
