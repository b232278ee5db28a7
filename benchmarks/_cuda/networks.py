"""The networks of `cuda.py`, with their optimizers and batches."""

from dataclasses import dataclass

import torch
from torch import nn

from evenly.recipes.networks.gpt import CharacterGPT


@dataclass(frozen=True)
class Case:
    """A GPT and its batch."""

    width: int
    depth: int
    heads: int
    vocabulary: int
    batch: int  # samples of a rank
    tokens: int  # of a sample
    dtype: torch.dtype  # of the parameters; float32 is trained under autocast to bfloat16
    is_compiled: bool = False

    def network(self, device: torch.device) -> nn.Module:
        """Returns the network with the same values on every rank."""
        torch.manual_seed(0)
        with device:
            model = CharacterGPT(
                width=self.width,
                depth=self.depth,
                heads=self.heads,
                vocabulary=self.vocabulary,
                context=1024,
                bias=True,
            )
        return model.to(self.dtype)

    def batch_of(self, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens [n, t] of a rank and those that follow them."""
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(self.vocabulary, (self.batch, self.tokens + 1), generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


GPT124M = {"width": 768, "depth": 12, "heads": 12, "vocabulary": 50257, "batch": 16, "tokens": 512}
GPT1B = {"width": 1792, "depth": 24, "heads": 14, "vocabulary": 50257, "batch": 16, "tokens": 1024}
SMALL = {"width": 64, "depth": 2, "heads": 2, "vocabulary": 65, "batch": 4, "tokens": 32}  # with --quick on a CPU
CASES = {
    "gpt124m": Case(**GPT124M, dtype=torch.float32),
    "gpt124m_compiled": Case(**GPT124M, dtype=torch.float32, is_compiled=True),
    "gpt1b": Case(**GPT1B, dtype=torch.bfloat16),
    "small": Case(**SMALL, dtype=torch.float32),
}
