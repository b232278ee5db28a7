"""The network that the plans of `plan.py` train."""

import torch
from torch import nn

INPUT_SHAPE = (3, 32, 32)  # of one sample
NUM_CLASSES = 10


def network() -> nn.Module:
    """Returns a convolutional network with enough work in every layer, always with the same parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, filters in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, filters, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(filters, filters, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, NUM_CLASSES))
