"""Mixed precision with a scaler: all ranks take or skip a step together."""

import torch
from torch import nn

from evenly.comm import RankGroup
from evenly.shards import GradScaler, shard_model
from tests.ranks import run_ranks


def steps(rank_group: RankGroup) -> list[tuple[bool, float]]:
    model = shard_model(nn.Linear(6, 4), torch.ones(2, 6), rank_group=rank_group, shares=[3, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=100)
    told = []
    for number in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 6)).sum()).backward()
        if number == 1 and rank_group.rank == 1:  # on one rank only
            next(model.parameters()).grad[:] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        told.append((moved, scaler.get_scale()))
    model.close()
    return told


def test_an_infinite_gradient_on_one_rank_makes_all_ranks_skip():
    assert run_ranks(2, steps) == [[(True, 4.0), (False, 2.0), (True, 2.0)]] * 2
