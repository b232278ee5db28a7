"""DenseNet-121: every layer sees the outputs of all layers before it in its stage.

Reference: Huang, Liu, van der Maaten, Weinberger, *Densely connected convolutional networks*, 2017.
"""

from collections.abc import Sequence

import torch
from torch import nn

from evenly.recipes.networks._parts import LARGE_SIZE, PooledClassifier, imagenet_stem


def densenet121(
    *,
    classes: int = 10,
    channels: int = 3,
    size: int = 32,
    growth: int = 32,
    blocks: Sequence[int] = (6, 12, 24, 16),
) -> nn.Module:
    """Returns DenseNet-BC with these layers a stage; 6,956,298 parameters, 7,978,856 for ImageNet."""
    width = 2 * growth
    stem = (
        imagenet_stem(channels, width) if size >= LARGE_SIZE else nn.Conv2d(channels, width, 3, padding=1, bias=False)
    )
    layers: list[nn.Module] = [stem]
    for stage, count in enumerate(blocks):
        if stage:
            layers.append(_transition(width, width // 2))
            width //= 2
        for _ in range(count):
            layers.append(DenseLayer(width, growth))
            width += growth
    layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return PooledClassifier(nn.Sequential(*layers), width, classes)


class DenseLayer(nn.Module):
    """Appends `growth` channels to its input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, inputs + growth, h, w]."""
        return torch.cat([self.branch(x), x], 1)


def _transition(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.AvgPool2d(2),
    )
