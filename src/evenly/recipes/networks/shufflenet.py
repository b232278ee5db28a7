"""ShuffleNetV2: half of the channels pass unchanged, then the halves are interleaved.

Reference: Ma, Zhang, Zheng, Sun, *ShuffleNet V2: practical guidelines for efficient CNN architecture design*, 2018.
"""

from collections.abc import Sequence

import torch
from torch import nn

from evenly.errors import SpecError
from evenly.recipes.networks._parts import LARGE_SIZE, PooledClassifier, conv_norm, conv_norm_relu, require_multiple

STEM_FILTERS = 24
BLOCKS = (4, 8, 4)


def shufflenetv2(
    *,
    classes: int = 10,
    channels: int = 3,
    size: int = 32,
    filters: Sequence[int] = (116, 232, 464),
    last_filters: int = 1024,
) -> nn.Module:
    """Returns ShuffleNetV2 1x, or other filters a stage; 1,263,854 parameters, 2,278,604 for ImageNet."""
    if len(filters) != len(BLOCKS):
        raise SpecError(
            f"shufflenetv2 was asked for with filters {tuple(filters)}, but it has {len(BLOCKS)} stages. Give the "
            "filters of each."
        )
    large = size >= LARGE_SIZE
    layers: list[nn.Module] = [conv_norm_relu(channels, STEM_FILTERS, stride=2 if large else 1)]
    if large:
        layers.append(nn.MaxPool2d(3, 2, padding=1))
    inputs = STEM_FILTERS
    for outputs, count in zip(filters, BLOCKS, strict=True):
        require_multiple("shufflenetv2", "filters", outputs, "halves", 2)
        layers += [ShuffleDown(inputs, outputs), *(ShuffleUnit(outputs) for _ in range(count - 1))]
        inputs = outputs
    layers.append(conv_norm_relu(inputs, last_filters, 1))
    return PooledClassifier(nn.Sequential(*layers), last_filters, classes)


class ShuffleUnit(nn.Module):
    """Changes one half of the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = _branch(width // 2, width // 2, stride=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, width, h, w]."""
        same, changed = x.chunk(2, 1)
        return interleaved(same, self.branch(changed))


class ShuffleDown(nn.Module):
    """Halves the side; both halves of the channels come from all inputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        half = outputs // 2
        self.shortcut = nn.Sequential(
            conv_norm(inputs, inputs, stride=2, groups=inputs), conv_norm_relu(inputs, half, 1)
        )
        self.branch = _branch(inputs, half, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, outputs, h / 2, w / 2]."""
        return interleaved(self.shortcut(x), self.branch(x))


def interleaved(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Returns the channels of both in turns: [n, 2c, h, w]."""
    pairs = torch.unflatten(torch.cat([first, second], 1), 1, (2, -1))  # [n, 2, c, h, w]
    return pairs.transpose(1, 2).flatten(1, 2)


def _branch(inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(
        conv_norm_relu(inputs, outputs, 1),
        conv_norm(outputs, outputs, stride=stride, groups=outputs),
        conv_norm_relu(outputs, outputs, 1),
    )
