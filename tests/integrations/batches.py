"""A network and unequal batches of three ranks on two nodes, for the tools that train."""

import torch
from torch import nn

from tests.reference import Batch, Reference

NODES = [[0, 1], [2]]
SIZES = (4, 3, 6)  # samples of a batch, by rank


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(SIZES[rank % len(SIZES)], 5, generator=generator, dtype=torch.float64)
    return x, torch.stack([x.sum(1), x.prod(1)], dim=1)


def batches_of(rank: int, steps: int) -> list[Batch]:
    return [batch(rank, step) for step in range(steps)]


def values(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()]).tolist()


def gan_networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return maker, nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def judge_loss(judge: nn.Module, maker: nn.Module, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    verdict = judge(torch.cat([real, maker(noise).detach()]))
    return nn.functional.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict).cumsum(0) % 2)


def maker_loss(judge: nn.Module, maker: nn.Module, noise: torch.Tensor) -> torch.Tensor:
    verdict = judge(maker(noise))
    return nn.functional.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))


def reference(model: nn.Module | None = None) -> Reference:
    return Reference(model or network(), lambda copied: torch.optim.AdamW(copied.parameters(), lr=0.01), NODES)
