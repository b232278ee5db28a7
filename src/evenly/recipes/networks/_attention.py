"""Parts of transformers: attention of a sequence to itself, the layers after it, patches of images."""

import torch
from torch import nn
from torch.nn import functional

from evenly.recipes.networks._parts import require_multiple

INITIAL_STD = 0.02  # of weights


class SelfAttention(nn.Module):
    """Attention of tokens [n, ..., t, width] to each other, in heads; optionally only to tokens before them."""

    def __init__(
        self, width: int, heads: int, *, causal: bool = False, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.dropout_rate = dropout
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=bias)
        self.project = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [n, ..., t, width]; `mask` is added to the scores [n, ..., heads, t, t]."""
        parts = self.queries_keys_values(x).chunk(3, -1)
        q, k, v = (split_heads(part, self.heads) for part in parts)  # [n, ..., heads, t, width / heads]
        rate = self.dropout_rate if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=rate, is_causal=self.causal)
        output: torch.Tensor = self.project(join_heads(y))
        return output


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Returns [n, ..., heads, t, width / heads] of [n, ..., t, width]."""
    return torch.unflatten(x, -1, (heads, -1)).transpose(-2, -3)


def join_heads(x: torch.Tensor) -> torch.Tensor:
    """Returns [n, ..., t, width] of [n, ..., heads, t, width / heads]."""
    return x.transpose(-2, -3).flatten(-2)


def mlp(width: int, *, ratio: int = 4, dropout: float = 0.0, bias: bool = True) -> nn.Sequential:
    """Returns two linear layers with GELU between them."""
    layers = [nn.Linear(width, ratio * width, bias=bias), nn.GELU(), nn.Linear(ratio * width, width, bias=bias)]
    return nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []))


class PatchEmbedding(nn.Module):
    """Tokens [n, t, width] of images: one for each patch."""

    def __init__(self, network: str, channels: int, width: int, *, size: int, patch: int) -> None:
        super().__init__()
        require_multiple(network, "size", size, "patch", patch)
        self.num_tokens = (size // patch) ** 2
        self.project = nn.Conv2d(channels, width, patch, patch)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the tokens, row by row."""
        tokens: torch.Tensor = self.project(images).flatten(2).transpose(1, 2)
        return tokens


def initialise(model: nn.Module) -> None:
    """Draws the weights of linear layers, embeddings and own parameters as transformers have them; biases are 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=INITIAL_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
