"""Sums, gathers and the six moves over ranks that hold unequal parts, against plain arithmetic on the whole tensor."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenly.comm import (
    MOVES,
    FailureMonitor,
    MemoryGroup,
    RankGroup,
    Redistribute,
    ShardGroup,
    count_of,
    memory_groups,
    open_group_inside,
    put,
    take,
)
from evenly.comm.memory import group as memory_group
from tests.ranks import run_ranks

Cut = tuple[tuple[tuple[int, int], ...], ...]

WHOLE: Cut = (((0, 6),),)
RAGGED: Cut = (((0, 4),), ((4, 5),), ((5, 6),))
SCATTERED: Cut = (((1, 3), (5, 6)), (), ((0, 1), (3, 5)))
ALONE: Cut = ((), ((0, 6),))
CUTS = [WHOLE, RAGGED, SCATTERED, ALONE, (((3, 6),), ((0, 3),), (), ())]
STATES = {  # of a tensor before and after each move
    "copy": ("replicated", "copied"),
    "reduce": ("partial", "replicated"),
    "reduce_scatter": ("partial", "sharded"),
    "gather_for_ranks": ("sharded", "copied"),
    "gather_for_all": ("sharded", "replicated"),
    "slice": ("replicated", "sharded"),
}


@pytest.fixture(params=["gloo", "memory", "memory in small slots"], scope="module", autouse=True)
def transport(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes every group of this file one over gloo, over shared memory, or over so little that all takes rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENLY_SHARED_MEMORY", str(int(request.param != "gloo")))
        if request.param == "memory in small slots":
            patch.setattr(memory_groups, "SLOT_BYTES", 64)
            patch.setattr(memory_group, "LEAST_TWO_PHASES", 48)
        yield


@contextmanager
def wired(rank_group: RankGroup) -> Iterator[ShardGroup]:
    group = open_group_inside(rank_group, "w", range(rank_group.size), None, timeout_s=20)
    assert isinstance(group, MemoryGroup) == (os.environ["EVENLY_SHARED_MEMORY"] == "1" and rank_group.size > 1)
    shard_group = ShardGroup(group, FailureMonitor(rank_group), timeout_s=20)
    try:
        yield shard_group
        shard_group.sum(torch.zeros(1)).wait()  # whoever is still connecting needs the others
    except BaseException as error:
        shard_group.monitor.report(error)
        raise
    finally:
        shard_group.close()


def over(cut: Cut, act: Callable[[ShardGroup], Any]) -> list[Any]:
    """Returns what every rank of a wire with as many ranks as the cut gives."""

    def run(rank_group: RankGroup) -> Any:
        with wired(rank_group) as shard_group:
            return act(shard_group)

    return run_ranks(len(cut), run)


def drawn(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns this rank's own numbers; small whole ones, whose sums are exact in every order."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 10, shape, generator=draw).to(dtype)


def dense(full: Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
    indices = [index for start, stop in ranges for index in range(start, stop)]
    return full.index_select(dim, torch.tensor(indices, dtype=torch.long))


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Draws a dim of up to 9 indices dealt out to up to 4 ranks in any ranges, some ranks with none."""
    ranks = draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=9))
    if ranks == 1:
        return (((0, len(owners)),),)
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for index, owner in enumerate(owners):
        ranges[owner].append((index, index + 1))
    return tuple(tuple(part) for part in ranges)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_take_and_put_are_indexing(cut: Cut, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = 6
    full = torch.randn(shape).transpose(0, 2).contiguous().transpose(0, 2)  # not contiguous
    whole = torch.full_like(full, torch.nan)
    for ranges in cut:
        piece = take(full, dim, ranges)
        assert piece.shape[dim] == count_of(ranges)
        assert piece.is_contiguous()
        assert torch.equal(piece, dense(full, dim, ranges))
        put(whole, piece, dim, ranges)
    assert torch.equal(whole, full)


@settings(max_examples=10)
@given(cuts(), st.integers(0, 2), st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64]))
def test_gather_gives_everyone_the_whole(cut: Cut, dim: int, dtype: torch.dtype) -> None:
    shape = [2, 1, 3]
    shape[dim] = sum(map(count_of, cut))
    full = drawn(0, *shape, dtype=dtype)
    for found in over(
        cut, lambda shard_group: shard_group.gather(take(full, dim, cut[shard_group.rank]), dim, cut).wait()
    ):
        assert torch.equal(found, full)


@settings(max_examples=10)
@given(cuts(), st.integers(0, 2), st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
def test_a_scattered_sum_gives_each_rank_its_part_of_the_sum(cut: Cut, dim: int, dtype: torch.dtype) -> None:
    shape = [2, 1, 3]
    shape[dim] = sum(map(count_of, cut))
    total = sum(drawn(rank, *shape, dtype=dtype) for rank in range(len(cut)))
    found = over(
        cut, lambda shard_group: shard_group.scatter_sum(drawn(shard_group.rank, *shape, dtype=dtype), dim, cut).wait()
    )
    for ranges, part in zip(cut, found, strict=True):
        assert part.dtype is dtype
        assert torch.equal(part, dense(total, dim, ranges))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ranks", "shape"), [(1, (2, 3)), (2, ()), (3, (2, 3)), (4, (1,)), (3, (0, 2))])
def test_a_sum_is_the_sum(ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    total = sum(drawn(rank, *shape, dtype=dtype) for rank in range(ranks))
    given = [drawn(rank, *shape, dtype=dtype) for rank in range(ranks)]
    for found in over(((),) * ranks, lambda shard_group: shard_group.sum(given[shard_group.rank]).wait()):
        assert found.dtype is dtype
        assert torch.equal(found, total)
    assert all(torch.equal(x, drawn(rank, *shape, dtype=dtype)) for rank, x in enumerate(given))  # stay as they were


def test_the_largest_of_the_ranks() -> None:
    def act(shard_group: ShardGroup) -> Tensor:
        return shard_group.sum(drawn(shard_group.rank, 4), largest=True).wait()

    truth = torch.stack([drawn(rank, 4) for rank in range(3)]).amax(0)
    assert all(torch.equal(found, truth) for found in over(RAGGED, act))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_summed_in_thirty_two(dtype: torch.dtype) -> None:
    big = 1 / torch.finfo(dtype).eps * 2  # big + 1 is big in 16 bits; big + 1 + 1 is not

    def act(shard_group: ShardGroup) -> tuple[Tensor, Tensor]:
        x = torch.full((6, 2), big if shard_group.rank == 0 else 1.0, dtype=dtype)
        return shard_group.sum(x).wait(), shard_group.scatter_sum(x, 0, RAGGED).wait()

    for total, part in over(RAGGED, act):
        assert total.dtype is part.dtype is dtype
        assert set(total.double().flatten().tolist()) == {big + 2}
        assert set(part.double().flatten().tolist()) == {big + 2}


def test_tensors_that_are_not_contiguous_travel_as_they_look() -> None:
    full = drawn(0, 5, 6, 3)

    def act(shard_group: ShardGroup) -> list[Tensor]:
        x = (full + shard_group.rank).transpose(0, 2)  # [3, 6, 5]
        part = take(full, 1, SCATTERED[shard_group.rank]).transpose(0, 2)
        slices = full.transpose(0, 2)[:, ::2]
        done = [
            shard_group.sum(x),
            shard_group.gather(part, 1, SCATTERED),
            shard_group.scatter_sum(x, 1, SCATTERED),
            shard_group.sum(slices),
        ]
        return [pending.wait() for pending in done]

    turned = full.transpose(0, 2)
    for rank, (total, whole, part, other) in enumerate(over(SCATTERED, act)):
        assert torch.equal(total, 3 * turned + 3)
        assert torch.equal(whole, turned)
        assert torch.equal(part, dense(3 * turned + 3, 1, SCATTERED[rank]))
        assert torch.equal(other, 3 * turned[:, ::2])


def test_what_is_under_way_may_be_waited_for_in_any_order() -> None:
    def act(shard_group: ShardGroup) -> list[Tensor]:
        started = [shard_group.sum(drawn(shard_group.rank + 10 * i, 3)) for i in range(4)]
        return [pending.wait() for pending in reversed(started)]

    truth = [sum(drawn(rank + 10 * i, 3) for rank in range(3)) for i in reversed(range(4))]
    for found in over(RAGGED, act):
        assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


def space(state: str, cut: Cut, salt: int) -> list[Tensor]:
    """Returns one tensor a rank, as a tensor in this state may be: [2, 6, 3] cut along dim 1."""
    shape = (2, sum(map(count_of, cut)), 3)
    if state == "replicated":
        return [drawn(salt, *shape) for _ in cut]
    if state == "sharded":
        return [drawn(salt + rank, 2, count_of(ranges), 3) for rank, ranges in enumerate(cut)]
    return [drawn(salt + rank, *shape) for rank in range(len(cut))]


def product(state: str, a: list[Tensor], b: list[Tensor]) -> float:
    """Returns the inner product over all ranks; of a replicated tensor there is one, however many have it."""
    each = [float((x * y).sum()) for x, y in zip(a, b, strict=True)]
    return each[0] if state == "replicated" else sum(each)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MOVES)
def test_the_backward_of_a_move_is_its_adjoint(name: str, cut: Cut) -> None:
    """<A x, y> = <x, A^T y>, summed over ranks: whatever else it does, it neither loses nor repeats a gradient."""
    before, after = STATES[name]
    x, y = space(before, cut, 1), space(after, cut, 50)

    def act(shard_group: ShardGroup) -> tuple[Tensor, Tensor, Tensor]:
        move, own = Redistribute(shard_group, name, 1, cut), x[shard_group.rank].requires_grad_()
        moved = move(own)
        moved.backward(y[shard_group.rank])
        assert own.grad is not None
        return moved.detach(), own.grad, move.backward(y[shard_group.rank]).wait()

    moved, gradients, again = (list(part) for part in zip(*over(cut, act), strict=True))
    x = [tensor.detach() for tensor in x]
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    gradient_state = "copied" if before == "partial" else before  # of a sum, every rank gets all of the gradient
    assert product(after, moved, y) == product(gradient_state, x, gradients)
    if after == "replicated":
        assert all(torch.equal(tensor, moved[0]) for tensor in moved)
    if before == "replicated":
        assert all(torch.equal(tensor, gradients[0]) for tensor in gradients)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MOVES)
def test_a_move_keeps_the_value(name: str, cut: Cut) -> None:
    """The whole tensor that the parts stand for is the same before and after."""
    before, after = STATES[name]
    x = space(before, cut, 7)
    moved = over(cut, lambda shard_group: Redistribute(shard_group, name, 1, cut).forward(x[shard_group.rank]).wait())
    for tensor in worth(after, moved, cut):
        assert torch.equal(tensor, worth(before, x, cut)[0])


def worth(state: str, tensors: list[Tensor], cut: Cut) -> list[Tensor]:
    """Returns the whole tensor, as each rank that can tell knows it."""
    if state == "partial":
        return [torch.stack(tensors).sum(0)]
    if state != "sharded":
        return tensors
    whole = torch.full((2, sum(map(count_of, cut)), 3), torch.nan, dtype=torch.float64)
    for tensor, ranges in zip(tensors, cut, strict=True):
        put(whole, tensor, 1, ranges)
    return [whole]


def test_every_byte_is_counted_once() -> None:
    def act(shard_group: ShardGroup) -> list[tuple[int, int]]:
        x, part = drawn(0, 6, 5), drawn(0, count_of(RAGGED[shard_group.rank]), 5)
        counted = []
        for start in (
            lambda: shard_group.sum(x),
            lambda: shard_group.gather(part, 0, RAGGED),
            lambda: shard_group.scatter_sum(x, 0, RAGGED),
            lambda: shard_group.sum(x[:0]),
            lambda: Redistribute(shard_group, "slice", 0, RAGGED).forward(x),
            lambda: Redistribute(shard_group, "copy").forward(x),
        ):
            shard_group.traffic.clear()
            start().wait()
            counted.append((shard_group.traffic.messages, shard_group.traffic.sent_bytes))
        return counted

    once = 2 * 6 * 5 * 8  # bytes of the whole tensor, to two other ranks
    assert over(RAGGED, act) == [[(1, 2 * once), (1, once), (1, once), (0, 0), (0, 0), (0, 0)]] * 3


def test_a_rank_on_its_own_sends_nothing() -> None:
    def act(shard_group: ShardGroup) -> int:
        for name in MOVES:
            x = drawn(0, 2, 6, 3).requires_grad_()
            moved = Redistribute(shard_group, name, 1, WHOLE)(x)
            moved.sum().backward()
            assert torch.equal(moved, x)
            assert x.grad is not None
            assert torch.equal(x.grad, torch.ones_like(x))
        return shard_group.traffic.messages

    assert over(WHOLE, act) == [0]


def test_a_rank_hears_what_another_has() -> None:
    def act(shard_group: ShardGroup) -> tuple[Tensor, Any]:
        return shard_group.broadcast(drawn(shard_group.rank, 3), source=1), shard_group.broadcast_object(
            {"rank": shard_group.rank}, source=2
        )

    for tensor, said in over(RAGGED, act):
        assert torch.equal(tensor, drawn(1, 3))
        assert said == {"rank": 2}
