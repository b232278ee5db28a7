"""Two models, two optimizers, two calls of `synchronize`: a tiny GAN that learns the points of a ring."""

import os

import torch
import torch.distributed as dist
from torch import nn

import evenly


def open_group() -> None:
    if "RANK" in os.environ:  # torchrun, evenly launch, evenly lab
        dist.init_process_group("gloo")
    else:  # a single process
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def report(count: int, generator: torch.Generator) -> torch.Tensor:
    angle = 2 * torch.pi * torch.rand(count, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], dim=1)  # [count, 2]


def main() -> None:
    open_group()
    torch.manual_seed(0)
    own = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank draws points of its own

    maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    maker_optimizer = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.99))
    judge_optimizer = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.99))
    maker = evenly.synchronize(maker, maker_optimizer, every=10)
    judge = evenly.synchronize(judge, judge_optimizer, every=10)
    blame = nn.functional.binary_cross_entropy_with_logits

    for _ in range(300):
        real, noise = report(64, own), torch.randn(64, 4, generator=own)
        with torch.no_grad():
            fake = maker(noise)
        verdict = judge(torch.cat([real, fake]))  # one forward, so that one averaging covers both
        loss = blame(verdict, torch.cat([torch.ones(64, 1), torch.zeros(64, 1)]))
        loss.backward()
        judge_optimizer.step()
        judge_optimizer.zero_grad()

        verdict = judge.module(maker(noise))  # the plain judge: its gradients are thrown away, not averaged
        blame(verdict, torch.ones(64, 1)).backward()
        maker_optimizer.step()
        maker_optimizer.zero_grad()
        judge_optimizer.zero_grad()

    maker.finish()
    judge.finish()
    with torch.no_grad():
        radius = maker(torch.randn(2000, 4, generator=own)).norm(dim=1)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: radius {radius.mean():.2f} +- {radius.std():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
