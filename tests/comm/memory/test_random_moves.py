"""Random moves of random tensors, over gloo and over shared memory: the same values, and bits where sums allow it."""

import random
from itertools import pairwise

import pytest
import torch

from evenly.comm import RankGroup, Redistribute, ShardGroup, count_of, take
from evenly.comm.memory import group as memory_group
from tests.comm.memory.groups import open_pair
from tests.ranks import run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8)
NAMES = ("copy", "reduce", "reduce_scatter", "gather_for_ranks", "gather_for_all", "slice")


def test_random_moves() -> None:
    compare_moves(200, seed=1)


@pytest.mark.slow
def test_ten_thousand_random_moves() -> None:
    for seed in range(10):
        compare_moves(1000, seed=seed)


def test_random_moves_through_small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenly.comm.memory_groups.SLOT_BYTES", 192)
    monkeypatch.setattr(memory_group, "LEAST_TWO_PHASES", 100)
    compare_moves(100, seed=5)


def compare_moves(count: int, *, seed: int) -> None:
    num_ranks = 2 + seed % 3

    def act(rank_group: RankGroup) -> int:
        with open_pair(rank_group) as (gloo, memory):
            for number in range(count):
                compare_one(random.Random(f"{seed} {number}"), gloo, memory)
            assert memory.traffic.messages == gloo.traffic.messages
            assert memory.traffic.by_name == gloo.traffic.by_name
            return gloo.traffic.messages

    assert min(run_ranks(num_ranks, act)) > 0


def compare_one(draw: random.Random, gloo: ShardGroup, memory: ShardGroup, device: str | torch.device = "cpu") -> None:
    """Makes one or several moves at a time in both groups; `draw` is the same on all ranks."""
    moves, expected, found = [], [], []
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        name, dim, dtype = draw.choice(NAMES), draw.randrange(3), draw.choice(DTYPES)
        shape = [
            draw.choice([1, 2, 5]),
            draw.choice([1, 3, 8]),
            draw.choice([1, 7, 40 if draw.random() < 0.9 else 4000]),
        ]
        segments = cut(draw, shape[dim], gloo.size)
        own = torch.Generator().manual_seed(draw.randrange(1 << 30) + gloo.rank)
        x = values(shape, dtype, own).to(device)
        if name.startswith("gather"):
            x = take(x, dim, segments[gloo.rank])
        if draw.random() < 0.3:
            x = x.transpose(0, 2).contiguous().transpose(0, 2)  # not contiguous
        backward = draw.random() < 0.3 and name in ("copy", "slice")  # the other way does nothing
        if backward and name == "slice":
            x = take(x, dim, segments[gloo.rank])
        moves.append((name, dtype, x))
        for shard_group, results in ((gloo, expected), (memory, found)):
            move = Redistribute(shard_group, name, dim, segments)
            results.append(move.backward(x) if backward else move.forward(x))
    order = draw.sample(range(len(moves)), len(moves))
    for pending in (expected, found):
        for index in order:
            pending[index] = pending[index].wait()
    for (name, dtype, x), truth, value in zip(moves, expected, found, strict=True):
        assert value.dtype is truth.dtype
        assert value.shape == truth.shape
        is_sum = name in ("copy", "reduce", "reduce_scatter")
        if not is_sum or not dtype.is_floating_point or gloo.size == 2 or dtype.itemsize < 4:
            assert torch.equal(value, truth), (name, dtype, x.shape)
        else:  # gloo adds in the order of a ring
            torch.testing.assert_close(value, truth, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def cut(draw: random.Random, size: int, num_ranks: int) -> list[tuple[tuple[int, int], ...]]:
    """Returns a dim dealt out to the ranks in random ranges; some ranks may have none."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    edges = sorted({0, size, *(draw.randrange(size + 1) for _ in range(draw.randrange(4)))})
    for start, stop in pairwise(edges):
        ranges[draw.randrange(num_ranks)].append((start, stop))
    assert sum(map(count_of, ranges)) == size
    return [tuple(part) for part in ranges]


def values(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)
