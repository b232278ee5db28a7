"""EfficientNet-B0: inverted residual blocks with squeeze and excitation.

Reference: Tan, Le, *EfficientNet: rethinking model scaling for convolutional neural networks*, 2019.
"""

import torch
from torch import nn

from evenly.recipes.networks._parts import LARGE_SIZE, PlainSum, PooledClassifier, conv_norm, scaled_filters

# expansion, filters, blocks, stride of the first block, kernel
STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


def efficientnet_b0(
    *, classes: int = 10, channels: int = 3, size: int = 32, width: float = 1.0, dropout: float = 0.2
) -> nn.Module:
    """Returns EfficientNet-B0 with `width` times the channels; 4,020,358 parameters, 5,288,548 for ImageNet.

    Small images skip the first stride. Blocks are never left out at random (the paper's stochastic depth).
    """
    inputs, last = scaled_filters(32, width), scaled_filters(1280, width)
    layers: list[nn.Module] = [_silu(channels, inputs, stride=2 if size >= LARGE_SIZE else 1)]
    for expansion, filters, count, first_stride, kernel in STAGES:
        outputs = scaled_filters(filters, width)
        for index in range(count):
            layers.append(_block(inputs, outputs, expansion, kernel, stride=1 if index else first_stride))
            inputs = outputs
    layers.append(_silu(inputs, last, 1))
    return PooledClassifier(nn.Sequential(*layers), last, classes, dropout=dropout)


class SqueezeExcitation(nn.Module):
    """Scales every channel by a gate between 0 and 1 that depends on the means of all channels."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.Conv2d(width, squeezed, 1), nn.SiLU(inplace=True), nn.Conv2d(squeezed, width, 1), nn.Sigmoid()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, width, h, w]."""
        scaled: torch.Tensor = x * self.gate(x.mean((2, 3), keepdim=True))
        return scaled


def _block(inputs: int, outputs: int, expansion: int, kernel: int, *, stride: int) -> nn.Module:
    inner = expansion * inputs
    branch = nn.Sequential(
        *([_silu(inputs, inner, 1)] if expansion > 1 else []),
        _silu(inner, inner, kernel, stride=stride, groups=inner),
        SqueezeExcitation(inner, max(1, inputs // 4)),
        conv_norm(inner, outputs, 1),
    )
    return PlainSum(branch) if stride == 1 and inputs == outputs else branch


def _silu(inputs: int, outputs: int, kernel: int = 3, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return conv_norm(inputs, outputs, kernel, stride=stride, groups=groups, activation=nn.SiLU(inplace=True))
