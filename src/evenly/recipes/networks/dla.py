"""DLA-34: residual blocks joined by trees of aggregation.

Reference: Yu, Wang, Shelhamer, Darrell, *Deep layer aggregation*, 2018.
"""

from collections.abc import Sequence

import torch
from torch import nn

from evenly.recipes.networks._parts import LARGE_SIZE, PooledClassifier, conv_norm, conv_norm_relu


def dla(*, classes: int = 10, channels: int = 3, size: int = 32, width: int = 16) -> nn.Module:
    """Returns DLA-34; 15,232,314 parameters, 15,742,104 for ImageNet (published: 15.8 million).

    The published program also makes two projections that nothing uses; they are left out.
    """
    large = size >= LARGE_SIZE
    first = 2 if large else 1  # stride of the first two stages with one
    features = nn.Sequential(
        conv_norm_relu(channels, width, 7 if large else 3),
        conv_norm_relu(width, width),
        conv_norm_relu(width, 2 * width, stride=first),
        AggregationTree(1, 2 * width, 4 * width, stride=first, keeps_input=False),
        AggregationTree(2, 4 * width, 8 * width, stride=2, keeps_input=True),
        AggregationTree(2, 8 * width, 16 * width, stride=2, keeps_input=True),
        AggregationTree(1, 16 * width, 32 * width, stride=2, keeps_input=True),
    )
    return PooledClassifier(features, 32 * width, classes)


class AggregationTree(nn.Module):
    """A binary tree of residual blocks of this depth; its root joins the last two outputs and those given to it."""

    def __init__(
        self, depth: int, inputs: int, outputs: int, *, stride: int, keeps_input: bool = False, joined: int = 0
    ) -> None:
        super().__init__()
        joined += inputs if keeps_input else 0  # channels that the root joins, besides those of its two subtrees
        self.pool = nn.MaxPool2d(stride) if stride > 1 else nn.Identity()
        self.keeps_input = keeps_input
        self.is_leaf = depth == 1
        if self.is_leaf:
            self.project = conv_norm(inputs, outputs, 1) if inputs != outputs else nn.Identity()
            self.first: nn.Module = AggregatedBlock(inputs, outputs, stride)
            self.second: nn.Module = AggregatedBlock(outputs, outputs, 1)
            self.root = conv_norm_relu(2 * outputs + joined, outputs, 1)
        else:
            self.first = AggregationTree(depth - 1, inputs, outputs, stride=stride)
            self.second = AggregationTree(depth - 1, outputs, outputs, stride=1, joined=joined + outputs)

    def forward(self, x: torch.Tensor, earlier: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Returns the root's output; `earlier` are outputs that the root joins too."""
        joined = [*earlier, *([self.pool(x)] if self.keeps_input else [])]
        if not self.is_leaf:
            first = self.first(x)
            total: torch.Tensor = self.second(first, [*joined, first])
            return total
        first = self.first(x, self.project(self.pool(x)))
        second = self.second(first, first)
        output: torch.Tensor = self.root(torch.cat([second, first, *joined], 1))
        return output


class AggregatedBlock(nn.Module):
    """Two 3 x 3 convolutions, and a shortcut that is given."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(conv_norm_relu(inputs, outputs, stride=stride), conv_norm(outputs, outputs))

    def forward(self, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        """Returns the block's output."""
        return torch.relu(self.branch(x) + shortcut)
