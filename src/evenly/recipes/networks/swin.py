"""Swin transformer: attention inside windows that are shifted in every second block.

Reference: Liu and others, *Swin transformer: hierarchical vision transformer using shifted windows*, 2021.
"""

from collections.abc import Sequence

import torch
from torch import nn

from evenly.errors import SpecError
from evenly.recipes.networks._attention import SelfAttention, initialise, mlp
from evenly.recipes.networks._parts import require_multiple


class SwinTransformer(nn.Module):
    """Logits [n, classes] of images; by default Swin-T with patches of 2 x 2, windows of 4 x 4: 27,505,108 parameters.

    With patch=4, window=7, size=224 and classes=1000 it is the published one of 28,288,354 parameters. A stage whose
    side is not larger than the window has one window.
    """

    def __init__(
        self,
        *,
        classes: int = 10,
        channels: int = 3,
        size: int = 32,
        patch: int = 2,
        window: int = 4,
        width: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        heads: Sequence[int] = (3, 6, 12, 24),
    ) -> None:
        super().__init__()
        if len(depths) != len(heads):
            raise SpecError(
                f"swin was asked for with depths {tuple(depths)} and heads {tuple(heads)}, but every stage has both. "
                "Give as many heads as depths."
            )
        require_multiple("swin", "size", size, "patch", patch)
        side = size // patch
        stages: list[nn.Module] = []
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.first_norm = nn.LayerNorm(width)
        for stage, (depth, stage_heads) in enumerate(zip(depths, heads, strict=True)):
            if stage:
                require_multiple("swin", "side of a stage", side, "merged patches", 2)
                stages.append(PatchMerging(width))
                width, side = 2 * width, side // 2
            require_multiple("swin", "width", width, "heads", stage_heads)
            stages += [
                SwinBlock(width, stage_heads, side=side, window=window, shifted=i % 2 == 1) for i in range(depth)
            ]
        self.stages = nn.Sequential(*stages)
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits [n, classes]."""
        x = self.first_norm(self.patches(images).permute(0, 2, 3, 1))  # [n, h, w, width]
        x = self.last_norm(self.stages(x))
        logits: torch.Tensor = self.head(x.mean((1, 2)))
        return logits


class PatchMerging(nn.Module):
    """Joins 2 x 2 neighbours into one token of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduce = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, h / 2, w / 2, 2 width]."""
        neighbours = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        merged: torch.Tensor = self.reduce(self.norm(torch.cat(neighbours, -1)))
        return merged


class SwinBlock(nn.Module):
    """Attention in windows and two linear layers, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, *, side: int, window: int, shifted: bool) -> None:
        super().__init__()
        window = min(window, side)
        require_multiple("swin", "side of a stage", side, "window", window)
        self.window, self.windows = window, side // window
        self.shift = window // 2 if shifted and side > window else 0
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = SelfAttention(width, heads), mlp(width)
        self.bias = nn.Embedding((2 * window - 1) ** 2, heads)  # of scores, by relative position
        self.register_buffer("relative", _relative_positions(window), persistent=False)
        self.register_buffer("separate", _separate(side, window, self.shift) if self.shift else None, persistent=False)
        self.relative: torch.Tensor
        self.separate: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, h, w, width]."""
        y = self.norm1(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = self._from_windows(self.attention(self._to_windows(y), self._mask()))
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        total: torch.Tensor = x + self.mlp(self.norm2(x))
        return total

    def _mask(self) -> torch.Tensor:
        """Returns what is added to the scores: [heads, t, t], or [windows, heads, t, t] if windows are shifted."""
        bias: torch.Tensor = self.bias(self.relative).permute(2, 0, 1)
        return bias if self.separate is None else bias + self.separate.to(bias.dtype)

    def _to_windows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, windows, t, width] of [n, h, w, width]."""
        parts = torch.unflatten(torch.unflatten(x, 2, (self.windows, self.window)), 1, (self.windows, self.window))
        return parts.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def _from_windows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, h, w, width] of [n, windows, t, width]."""
        parts = torch.unflatten(torch.unflatten(x, 2, (self.window, self.window)), 1, (self.windows, self.windows))
        return parts.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _relative_positions(window: int) -> torch.Tensor:
    """Returns for each pair of tokens of a window the number of their relative position: [t, t]."""
    place = torch.arange(window)
    rows, columns = place.repeat_interleave(window), place.repeat(window)  # [t]
    down, right = rows[:, None] - rows + window - 1, columns[:, None] - columns + window - 1
    return down * (2 * window - 1) + right


def _separate(side: int, window: int, shift: int) -> torch.Tensor:
    """Returns -100 for pairs of tokens that only the shift put into one window, else 0: [windows, 1, t, t]."""
    place = torch.arange(side)
    band = (place >= side - window).long() + (place >= side - shift).long()
    regions = 3 * band[:, None] + band  # [side, side]
    count = side // window
    of_windows = regions.view(count, window, count, window).transpose(1, 2).reshape(count**2, window**2)
    return -100.0 * (of_windows[:, :, None] != of_windows[:, None, :]).float()[:, None]
