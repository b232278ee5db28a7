"""The networks that `shards.py` and `shards_cuda.py` cut."""

import torch
from torch import nn

from evenly.recipes.networks.published import PublishedCifarNet


def wide_net() -> nn.Module:
    """Returns the late part of a network: convolutions of 240 to 480 filters and an MLP of 4096."""
    return nn.Sequential(
        nn.Conv2d(120, 240, 3, padding=1), nn.ReLU(), nn.Conv2d(240, 240, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(240, 480, 3, padding=1), nn.ReLU(), nn.Conv2d(480, 480, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(480 * 4, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10),
    )  # fmt: skip


def network_and_batch(name: str, batch_size: int) -> tuple[nn.Module, torch.Tensor]:
    """Returns the published network ("cifar") or the wide one ("wide"), and a batch for it, the same on every rank."""
    torch.manual_seed(0)
    if name == "cifar":
        return PublishedCifarNet(), torch.randn(batch_size, 3, 32, 32)
    return wide_net(), torch.randn(batch_size, 120, 8, 8)


def labels_for(batch_size: int) -> torch.Tensor:
    """Returns labels of ten classes, the same on every rank."""
    return torch.randint(10, (batch_size,), generator=torch.Generator().manual_seed(1))
