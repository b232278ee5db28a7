"""A residual network for small grey images."""

import torch
from torch import nn


class SmallBlock(nn.Module):
    """Two 3 x 3 convolutions around a skip."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        plain = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if plain else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output."""
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return torch.relu(y + self.skip(x))


class SmallResNet(nn.Module):
    """Logits [n, classes] of images, by stages of 1, 2 and 4 times `width`; 77,562 parameters (width 64: 1.2 M)."""

    def __init__(self, width: int = 16, *, blocks: int = 1, classes: int = 10, channels: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages, inputs = [], width
        for stage in range(3):
            for block in range(blocks):
                outputs = width * 2**stage
                stages.append(SmallBlock(inputs, outputs, stride=2 if stage and not block else 1))
                inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits [n, classes]."""
        y = self.stages(self.stem(x))  # [n, 4w, 4, 4]
        logits: torch.Tensor = self.head(y.mean((2, 3)))
        return logits
