"""The narrow ResNets of section 4.2 of the paper: three stages of 16, 32 and 64 filters.

Reference: He, Zhang, Ren, Sun, *Deep residual learning for image recognition*, 2016.
"""

from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from evenly.recipes.networks._parts import PooledClassifier, ResidualSum, conv_norm, conv_norm_relu

Shortcut = Literal["pad", "conv"]


def resnet20(*, classes: int = 10, channels: int = 3, width: int = 16, shortcut: Shortcut = "pad") -> nn.Module:
    """Returns ResNet-20; 269,722 parameters, 272,474 with shortcut="conv"."""
    return _cifar_resnet(3, classes=classes, channels=channels, width=width, shortcut=shortcut)


def resnet32(*, classes: int = 10, channels: int = 3, width: int = 16, shortcut: Shortcut = "pad") -> nn.Module:
    """Returns ResNet-32; 464,154 parameters, 466,906 with shortcut="conv"."""
    return _cifar_resnet(5, classes=classes, channels=channels, width=width, shortcut=shortcut)


def resnet56(*, classes: int = 10, channels: int = 3, width: int = 16, shortcut: Shortcut = "pad") -> nn.Module:
    """Returns ResNet-56; 853,018 parameters, 855,770 with shortcut="conv"."""
    return _cifar_resnet(9, classes=classes, channels=channels, width=width, shortcut=shortcut)


def _cifar_resnet(blocks: int, *, classes: int, channels: int, width: int, shortcut: Shortcut) -> nn.Module:
    layers: list[nn.Module] = [conv_norm_relu(channels, width)]
    inputs = width
    for stage in range(3):
        for index in range(blocks):
            outputs = width * 2**stage
            layers.append(_block(inputs, outputs, 2 if stage and not index else 1, shortcut))
            inputs = outputs
    return PooledClassifier(nn.Sequential(*layers), inputs, classes)


def _block(inputs: int, outputs: int, stride: int, shortcut: Shortcut) -> nn.Module:
    branch = nn.Sequential(conv_norm_relu(inputs, outputs, stride=stride), conv_norm(outputs, outputs))
    if stride == 1:
        return ResidualSum(branch, nn.Identity())
    if shortcut == "conv":
        return ResidualSum(branch, conv_norm(inputs, outputs, 1, stride=stride))
    return ResidualSum(branch, PaddedShortcut(outputs - inputs))


class PaddedShortcut(nn.Module):
    """Every second position, with channels of zeros before and after: option A of the paper, without parameters."""

    def __init__(self, zeros: int) -> None:
        super().__init__()
        self.zeros = zeros

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the shortcut's output, of half the side."""
        before = self.zeros // 2
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, before, self.zeros - before))
