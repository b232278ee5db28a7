"""Vision transformer with a class token.

Reference: Dosovitskiy and others, *An image is worth 16x16 words: transformers for image recognition at scale*, 2021;
widths of Touvron and others, *Training data-efficient image transformers*, 2021.
"""

import torch
from torch import nn

from evenly.recipes.networks._attention import INITIAL_STD, PatchEmbedding, SelfAttention, initialise, mlp
from evenly.recipes.networks._parts import require_multiple


class VisionTransformer(nn.Module):
    """Logits [n, classes] of images; by default ViT-Ti with patches of 4 x 4: 5,362,762 parameters.

    The published ViT-Ti, ViT-S and ViT-B have width 192, 384 and 768 with 3, 6 and 12 heads: 5,717,416, 22,050,664 and
    86,567,656 parameters with patch=16, size=224 and classes=1000.
    """

    def __init__(
        self,
        *,
        classes: int = 10,
        channels: int = 3,
        size: int = 32,
        patch: int = 4,
        width: int = 192,
        depth: int = 12,
        heads: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_multiple("vit", "width", width, "heads", heads)
        self.patches = PatchEmbedding("vit", channels, width, size=size, patch=patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * INITIAL_STD)
        self.positions = nn.Parameter(torch.randn(1, self.patches.num_tokens + 1, width) * INITIAL_STD)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(VitBlock(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits [n, classes]."""
        x = self.patches(images)  # [n, t, width]
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1)  # [n, 1 + t, width]
        x = self.blocks(self.dropout(x + self.positions))
        logits: torch.Tensor = self.head(self.norm(x[:, 0]))
        return logits


class VitBlock(nn.Module):
    """Attention, then two linear layers, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = mlp(width, dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tokens [n, t, width]."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        total: torch.Tensor = x + self.mlp(self.norm2(x))
        return total
