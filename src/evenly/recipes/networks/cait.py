"""CaiT: heads that mix, residuals that start small, and a class token that joins late.

Reference: Touvron, Cord, Sablayrolles, Synnaeve, Jégou, *Going deeper with image transformers*, 2021.
"""

import torch
from torch import nn

from evenly.recipes.networks._attention import (
    INITIAL_STD,
    PatchEmbedding,
    initialise,
    join_heads,
    mlp,
    split_heads,
)
from evenly.recipes.networks._parts import require_multiple


class CaitTransformer(nn.Module):
    """Logits [n, classes] of images; by default CaiT-XXS-24 with patches of 4 x 4: 11,601,610 parameters.

    With patch=16, size=224 and classes=1000 it is the published one of 11,956,264 parameters.
    """

    def __init__(
        self,
        *,
        classes: int = 10,
        channels: int = 3,
        size: int = 32,
        patch: int = 4,
        width: int = 192,
        depth: int = 24,
        class_depth: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        require_multiple("cait", "width", width, "heads", heads)
        scale = 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6  # as in the paper
        self.patches = PatchEmbedding("cait", channels, width, size=size, patch=patch)
        self.positions = nn.Parameter(torch.randn(1, self.patches.num_tokens, width) * INITIAL_STD)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * INITIAL_STD)
        self.blocks = nn.Sequential(*(TalkingBlock(width, heads, scale) for _ in range(depth)))
        self.class_blocks = nn.ModuleList(ClassBlock(width, heads, scale) for _ in range(class_depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits [n, classes]."""
        x = self.blocks(self.patches(images) + self.positions)  # [n, t, width]
        token = self.class_token.expand(x.shape[0], -1, -1)  # [n, 1, width]
        for block in self.class_blocks:
            token = block(token, x)
        logits: torch.Tensor = self.head(self.norm(token)[:, 0])
        return logits


class TalkingHeads(nn.Module):
    """Attention whose scores are mixed over the heads, before and after the softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix_scores = nn.Linear(heads, heads)
        self.mix_weights = nn.Linear(heads, heads)
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [n, t, width]."""
        parts = self.queries_keys_values(x).chunk(3, -1)
        q, k, v = (split_heads(part, self.heads) for part in parts)  # [n, heads, t, width / heads]
        scores = (q * self.scale) @ k.transpose(-2, -1)  # [n, heads, t, t]
        scores = self.mix_scores(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = self.mix_weights(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        output: torch.Tensor = self.project(join_heads(weights @ v))
        return output


class ClassAttention(nn.Module):
    """Attention of the class token to itself and all others."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.queries = nn.Linear(width, width)
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the class token [n, 1, width] of all tokens, the class token first."""
        q = split_heads(self.queries(x[:, :1]), self.heads)  # [n, heads, 1, width / heads]
        k, v = (split_heads(part, self.heads) for part in (self.keys(x), self.values(x)))
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)  # [n, heads, 1, t]
        output: torch.Tensor = self.project(join_heads(weights @ v))
        return output


class TalkingBlock(nn.Module):
    """Attention and two linear layers, each after a norm, scaled by channel, and added to its input."""

    def __init__(self, width: int, heads: int, scale: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention, self.mlp = TalkingHeads(width, heads), mlp(width)
        self.scale1, self.scale2 = (nn.Parameter(torch.full((width,), scale)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tokens [n, t, width]."""
        x = x + self.scale1 * self.attention(self.norm1(x))
        total: torch.Tensor = x + self.scale2 * self.mlp(self.norm2(x))
        return total


class ClassBlock(nn.Module):
    """As `TalkingBlock`, but only the class token changes."""

    def __init__(self, width: int, heads: int, scale: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention, self.mlp = ClassAttention(width, heads), mlp(width)
        self.scale1, self.scale2 = (nn.Parameter(torch.full((width,), scale)) for _ in range(2))

    def forward(self, token: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns the class token [n, 1, width]."""
        token = token + self.scale1 * self.attention(self.norm1(torch.cat([token, x], 1)))
        total: torch.Tensor = token + self.scale2 * self.mlp(self.norm2(token))
        return total
