"""Tensors held in different cuts are averaged where they meet, each element once."""

import pytest
import torch

from evenly.comm import CollectiveWaiter, FailureMonitor, open_group, owners_of_slices
from evenly.comm.blocks.reducer import BlockReducer
from evenly.comm.blocks.replicas import FLAT, ReplicaRanks, TensorCut, whole_replicas
from tests.ranks import run_ranks

SHAPES = {"rows": (7, 4), "mixed": (5, 6, 3), "whole": (4, 9), "number": (), "thin": (1, 5), "empty": (0, 3)}
SHAPES["complex number"] = ()  # it travels as a pair of numbers
FIRST = ReplicaRanks(
    (0, 1, 2),
    {
        "rows": TensorCut(0, (((5, 7), (0, 1)), (), ((1, 5),))),
        "mixed": TensorCut(1, (((0, 2),), ((2, 3), (4, 6)), ((3, 4),))),
        "whole": TensorCut(),
        "number": TensorCut(),
        "complex number": TensorCut(),
        "thin": TensorCut(0, ((), ((0, 1),), ())),
        "empty": TensorCut(0, ((), (), ())),
    },
)
SECOND = ReplicaRanks(
    (3, 4),
    {
        "rows": TensorCut(1, (((0, 3),), ((3, 4),))),
        "mixed": TensorCut(0, (((3, 5),), ((0, 3),))),
        "whole": TensorCut(1, (((0, 4), (8, 9)), ((4, 8),))),
        "number": TensorCut(),
        "complex number": TensorCut(),
        "thin": TensorCut(),
        "empty": TensorCut(),
    },
)
THIRD = ReplicaRanks((5,), dict.fromkeys(SHAPES, TensorCut()))
MEETINGS = {
    "two replicas": [[FIRST], [SECOND]],
    "three replicas": [[SECOND], [FIRST], [THIRD]],
    "two nodes": [[FIRST, THIRD], [SECOND]],
    "one node": [[FIRST, SECOND, THIRD]],
}


def part(full, form, place):
    if form.dim is None:
        return full.clone()
    pieces = [full.narrow(form.dim, a, b - a) for a, b in form.segments[place]]
    return torch.cat([full.narrow(form.dim, 0, 0), *pieces], form.dim)


def values(side, dtype=torch.float64):
    g = torch.Generator().manual_seed(side)
    shapes = {**SHAPES, "complex number": (2,)}
    return {
        name: torch.randn(shape, generator=g, dtype=torch.float64).mul(50).to(dtype) for name, shape in shapes.items()
    }


@pytest.mark.parametrize("kind", ["sum", "max", "copy"])
@pytest.mark.parametrize("name", MEETINGS)
def test_every_rank_ends_with_its_part_of_the_result(name, kind):
    sides = MEETINGS[name]
    ranks = sorted(rank for side in sides for replica in side for rank in replica.ranks)
    weights = [0.0] * len(sides) if kind == "copy" else [0.25, 0.5, 2.0][: len(sides)]
    weights[-1 if kind == "copy" else 0] = 1.0
    dtypes = [torch.int64] if kind == "max" else [torch.float64, torch.float32]

    def act(rank_group):
        rank, monitor = ranks[rank_group.rank], FailureMonitor(rank_group)
        own = next(k for k, side in enumerate(sides) if any(rank in replica.ranks for replica in side))
        replica = next(replica for replica in sides[own] if rank in replica.ranks)
        opened = lambda key, circle: open_group(  # noqa: E731
            rank_group, key, [ranks.index(r) for r in circle], backend="gloo", timeout_s=20
        )
        reducer = BlockReducer("m", sides, SHAPES, rank=rank, open_group=opened)
        items = [
            (name, part(full, replica.forms[name], replica.ranks.index(rank)))
            for dtype in dtypes
            for name, full in values(own, dtype).items()
        ]
        waiter = CollectiveWaiter(monitor, label="here", timeout_s=20)
        sent = reducer.reduce(items, waiter, weight=weights[own], kind=kind)
        reducer.broadcast(items, waiter)
        reducer.close()
        monitor.close()
        return own, replica, replica.ranks.index(rank), items, sent

    results = run_ranks(len(ranks), act)
    sent = [0] * len(sides)
    for own, replica, place, items, sent_bytes in results:
        sent[own] += sent_bytes
        names = iter(items)
        for dtype in dtypes:
            held = [values(side, dtype) for side in range(len(sides))]
            for name in SHAPES:
                every = [full[name] for full in held]
                if kind == "max":
                    wanted = torch.stack(every).amax(0)
                else:
                    wanted = sum(w * x for w, x in zip(weights, every, strict=True)) if len(sides) > 1 else every[0]
                got_name, got = next(names)
                assert got_name == name
                assert torch.equal(got, part(wanted, replica.forms[name], place)) or kind == "sum"
                torch.testing.assert_close(got, part(wanted, replica.forms[name], place))
    once = sum(t.nbytes for dtype in dtypes for t in values(0, dtype).values())
    if len(sides) == 2:
        assert sent == [once, once]


def test_whole_networks_travel_as_vectors_of_which_nothing_is_copied():
    nodes, total = [[4, 1, 0], [3, 2]], 11

    def act(rank_group):
        monitor, rank = FailureMonitor(rank_group), rank_group.rank
        node = next(place for place, ranks in enumerate(nodes) if rank in ranks)
        owners = [ranks for ranks in owners_of_slices(nodes) if rank in ranks]
        groups = {
            ranks: open_group(rank_group, str(ranks), ranks, backend="gloo", timeout_s=20)
            for ranks in (tuple(nodes[node]), *owners)
        }
        labels = {ranks: f"{number}" for number, ranks in enumerate(owners)}
        reducer = BlockReducer("m", whole_replicas(nodes), {}, rank=rank, open_group=None, groups=groups, labels=labels)
        vectors = [torch.full((total,), torch.nan, dtype=dtype) for dtype in (torch.float32, torch.float64)]
        for vector in vectors:
            for start, stop in reducer.owned_ranges(total):  # what others speak for arrives
                vector[start:stop] = torch.arange(start, stop) + 100 * node
        items, waiter = [(FLAT, vector) for vector in vectors], CollectiveWaiter(monitor, label="here", timeout_s=20)
        bundles = reducer.pack(items, key="0")
        memory = {vector.untyped_storage().data_ptr() for vector in vectors}
        assert {bundle.part.values.untyped_storage().data_ptr() for bundle in bundles} == memory
        reducer.reduce(items, waiter, weight=0.5)
        reducer.broadcast(items, waiter)
        monitor.close()
        for group in groups.values():
            group.shutdown()
        return vectors, [bundle.part.key for bundle in bundles], reducer.owned_ranges(total)

    results = run_ranks(5, act)
    for vectors, _, _ in results:
        assert all(vector.tolist() == [place + 50.0 for place in range(total)] for vector in vectors)
    assert results[0][1:] == (["0/float32/0", "0/float64/0"], [(7, 11)])
    assert results[1][1:] == (["0/float32/0", "0/float32/1", "0/float64/0", "0/float64/1"], [(3, 5), (5, 7)])
