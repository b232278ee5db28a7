"""Networks that neither fx nor torch.export can trace: prints the error of each, and nothing else should be said."""

import torch
from torch import Tensor, nn

from evenly.errors import SpecError
from evenly.graph import trace


class Pair(nn.Module):
    """Two layers; what is between them is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


class ItemBranch(Pair):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        if h.sum().item() > 0:
            h = self.second(h)
        return h


class ValueBranch(Pair):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        return torch.relu(self.second(h)) if h.sum() > 0 else h


class NoMetaKernel(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(x))[: torch.unique(x).numel()]


def main() -> None:
    for network in (ItemBranch, ValueBranch, NoMetaKernel):
        try:
            trace(network(), torch.randn(8, 4))
        except SpecError as error:
            print(f"{network.__name__}: {error}")
            print(f"cause: {type(error.__cause__).__name__}")


if __name__ == "__main__":
    main()
