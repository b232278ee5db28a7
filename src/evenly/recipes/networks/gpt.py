"""A decoder-only transformer for characters.

References: Radford and others, *Language models are unsupervised multitask learners*, 2019; sizes of nanoGPT's
configuration for the characters of Shakespeare.
"""

import math

import torch
from torch import nn

from evenly.errors import SpecError
from evenly.recipes.networks._attention import INITIAL_STD, SelfAttention, mlp
from evenly.recipes.networks._parts import require_multiple


class CharacterGPT(nn.Module):
    """Logits [n, t, vocabulary] of the next token, of tokens [n, t]; 10,745,088 parameters.

    The token embedding is also the last layer. With context=1024, width=768, depth=12, heads=12, vocabulary=50257 and
    bias=True it is the published GPT-2 of 124,439,808 parameters.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 65,
        context: int = 256,
        width: int = 384,
        depth: int = 6,
        heads: int = 6,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        require_multiple("gpt", "width", width, "heads", heads)
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width) * INITIAL_STD)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(GptBlock(width, heads, dropout=dropout, bias=bias) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise(depth)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits [n, t, vocabulary]."""
        if tokens.shape[1] > self.context:
            raise SpecError(
                f"gpt was given {tokens.shape[1]} tokens a sample, but its context is {self.context}. Give shorter "
                "samples, or build it with a larger context."
            )
        x = self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])  # [n, t, width]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def _initialise(self, depth: int) -> None:
        """Draws the weights; those that add to the stream are smaller, so that its size does not grow with depth."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                adds = name.endswith(("attention.project", "mlp.2"))
                nn.init.normal_(module.weight, std=INITIAL_STD / (math.sqrt(2 * depth) if adds else 1.0))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


class GptBlock(nn.Module):
    """Attention to the tokens before, then two linear layers, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, *, dropout: float, bias: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.attention = SelfAttention(width, heads, causal=True, dropout=dropout, bias=bias)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.mlp = mlp(width, dropout=dropout, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tokens [n, t, width]."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        total: torch.Tensor = x + self.mlp(self.norm2(x))
        return total
