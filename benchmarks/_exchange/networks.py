"""The networks that the methods of `exchange.py` train in turns."""

import torch
from torch import nn

BATCH_SIZE = 32  # samples of a rank, for `network`
MAX_BATCH_SIZE = 64  # samples of a rank with which `busy_network` is tried first


def network() -> nn.Module:
    """Returns two convolutions and two linear layers: 2.0 million parameters and little work for each."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 640), nn.ReLU(), nn.Linear(640, 10),
    )  # fmt: skip


def busy_network() -> nn.Module:
    """Returns three convolutions and two linear layers: 0.56 million parameters and more work for each."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 160), nn.ReLU(), nn.Linear(160, 10),
    )  # fmt: skip
