"""Parts that several networks have: convolution with norm, residual sum, pooled head."""

import torch
from torch import nn

from evenly.errors import SpecError

LARGE_SIZE = 64  # images of this side and larger go through the first layers that the papers have for ImageNet


def conv_norm(
    inputs: int, outputs: int, kernel: int = 3, *, stride: int = 1, groups: int = 1, activation: nn.Module | None = None
) -> nn.Sequential:
    """Returns a convolution without bias that keeps the size (but for its stride), batch norm, and an activation."""
    layers = [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([] if activation is None else [activation]))


def conv_norm_relu(inputs: int, outputs: int, kernel: int = 3, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Returns a convolution, batch norm, and ReLU."""
    return conv_norm(inputs, outputs, kernel, stride=stride, groups=groups, activation=nn.ReLU(inplace=True))


def imagenet_stem(channels: int, width: int) -> nn.Sequential:
    """Returns the first layers of ResNets for large images: 7 x 7 convolution and pooling, which quarter the side."""
    return nn.Sequential(conv_norm_relu(channels, width, 7, stride=2), nn.MaxPool2d(3, 2, padding=1))


class ResidualSum(nn.Module):
    """relu(branch(x) + shortcut(x))."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output."""
        return torch.relu(self.branch(x) + self.shortcut(x))


class PlainSum(nn.Module):
    """branch(x) + shortcut(x)."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = nn.Identity() if shortcut is None else shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output."""
        total: torch.Tensor = self.branch(x) + self.shortcut(x)
        return total


class PooledClassifier(nn.Module):
    """Logits [n, classes]: a linear layer of the mean over all positions of what `features` gives."""

    def __init__(self, features: nn.Module, width: int, classes: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = features
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits [n, classes]."""
        y = self.features(images).mean((2, 3))  # [n, width]
        logits: torch.Tensor = self.head(self.dropout(y))
        return logits


def require_multiple(network: str, what: str, value: int, unit_name: str, unit: int) -> None:
    """Raises `SpecError` unless `value` is a multiple of `unit`."""
    if value % unit:
        raise SpecError(
            f"{network} was asked for with {what} {value} and {unit_name} {unit}, but {value} is no multiple of "
            f"{unit}. Change one of them."
        )


def scaled_filters(filters: int, width: float) -> int:
    """Returns `width` times the filters, a multiple of 8, and not below nine tenths of it."""
    rounded = max(8, int(filters * width + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * filters * width else rounded + 8
