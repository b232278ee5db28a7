"""Groups of ragged nodes move the right data between the right ranks."""

from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist

from evenly.comm import (
    CollectiveWaiter,
    FailureMonitor,
    RankGroup,
    all_gather,
    all_reduce,
    backend_for,
    broadcast,
    close_groups,
    gather_json,
    open_group,
    open_groups,
    rank_group_of,
)
from evenly.errors import LaunchError
from evenly.spec import Device
from tests.ranks import ragged, run_ranks

CPU = Device(kind="cpu")


def cuda(identity: str = "") -> Device:
    return Device(kind="cuda", identity=identity)


def members(group: dist.ProcessGroup, rank: int, waiter: CollectiveWaiter) -> list[int]:
    """Returns the ranks that take part in a collective of `group`."""
    rows, work = all_gather(torch.tensor([rank]), group)
    waiter.wait([work])
    return rows[:, 0].tolist()


def look_around(rank_group: RankGroup, nodes: list[list[int]], global_gradients: bool) -> dict[str, object]:
    monitor = FailureMonitor(rank_group)
    waiter = CollectiveWaiter(monitor, label="a test", timeout_s=20.0)
    groups = open_groups(rank_group, nodes, [CPU] * rank_group.size, timeout_s=20.0, global_gradients=global_gradients)
    total, first = torch.tensor([2.0**rank_group.rank]), torch.tensor([rank_group.rank])
    waiter.wait([all_reduce(total, groups.node), broadcast(first, groups.node, source=0)])
    highest = torch.tensor([rank_group.rank])
    waiter.wait([all_reduce(highest, groups.world, largest=True)])
    seen = {
        "world": members(groups.world, rank_group.rank, waiter),
        "node": members(groups.node, rank_group.rank, waiter),
        "gradients": members(groups.gradients, rank_group.rank, waiter),
        "peers": {peers.owners: members(peers.group, rank_group.rank, waiter) for peers in groups.peers},
        "seat": (groups.index, groups.local_rank, groups.ranks),
        "total": total.item(),
        "first": first.item(),
        "highest": highest.item(),
    }
    monitor.close()
    return seen


@pytest.mark.parametrize("global_gradients", [False, True])
@pytest.mark.parametrize("nodes", [ragged(3, 1), ragged(2, 3), [[0, 3], [1], [2]], ragged(1)], ids=str)
def test_every_rank_meets_its_node_its_peers_and_everybody(nodes, global_gradients):
    size = sum(map(len, nodes))
    for rank, seen in enumerate(run_ranks(size, look_around, nodes, global_gradients)):
        mine = next(ranks for ranks in nodes if rank in ranks)
        assert seen["world"] == list(range(size))
        assert seen["node"] == mine
        assert seen["gradients"] == (list(range(size)) if global_gradients else mine)
        assert seen["peers"]
        assert all(list(owners) == ranks and rank in ranks for owners, ranks in seen["peers"].items())
        assert seen["seat"] == (nodes.index(mine), mine.index(rank), tuple(mine))
        assert (seen["total"], seen["first"]) == (sum(2.0**r for r in mine), mine[0])
        assert seen["highest"] == size - 1


def tell(rank_group: RankGroup) -> list[object]:
    monitor = FailureMonitor(rank_group)
    group = open_group(rank_group, "talk", range(rank_group.size), backend="gloo", timeout_s=20.0)
    value = {
        "rank": rank_group.rank,
        "text": "ü" * 999 * rank_group.rank,
        "more": [None, 1.5, {"a": True}][rank_group.rank :],
    }
    told = gather_json(value, group, CollectiveWaiter(monitor, label="a test", timeout_s=20.0))
    monitor.close()
    return told


def test_values_of_unequal_length_reach_everybody_in_order():
    first, *others = run_ranks(3, tell)
    assert [row["rank"] for row in first] == [0, 1, 2]
    assert [len(row["text"]) for row in first] == [0, 999, 1998]
    assert [row["more"] for row in first] == [[None, 1.5, {"a": True}], [1.5, {"a": True}], [{"a": True}]]
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        ([CPU], "gloo"),
        ([CPU, CPU], "gloo"),
        ([cuda("a")], "nccl"),
        ([cuda("a"), cuda("b")], "nccl"),
        ([cuda("a"), cuda("a")], "gloo"),  # two ranks on one GPU
        ([cuda("a"), CPU], "gloo"),
        ([cuda(), cuda()], "gloo"),  # hardware that cannot be told apart
    ],
)
def test_nccl_serves_distinct_gpus_and_gloo_everything_else(monkeypatch, devices, backend):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert backend_for(devices) == backend
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert backend_for(devices) == "gloo"


def test_without_an_open_group_there_is_no_party():
    with pytest.raises(LaunchError, match=r"no group is open.*init_process_group"):
        rank_group_of()


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("default_group")
def test_the_party_of_the_default_group():
    rank_group = rank_group_of()
    assert (rank_group.rank, rank_group.size) == (0, 1)
    assert rank_group_of(dist.group.WORLD).size == 1


@pytest.mark.usefixtures("default_group")
def test_a_rank_that_is_not_in_the_group_is_told_so():
    with pytest.raises(LaunchError):
        rank_group_of(dist.GroupMember.NON_GROUP_MEMBER)


def read_chapters(rank_group: RankGroup) -> list[bytes]:
    chapters = [rank_group.scoped("a"), rank_group.scoped("a"), rank_group.scoped("b")]
    for number, scoped in enumerate(chapters):
        scoped.store.set(f"{rank_group.rank}", str(number))
    return [scoped.store.get(str(1 - rank_group.rank)) for scoped in chapters]


def test_chapters_are_shared_by_the_ranks_and_apart_from_each_other():
    assert run_ranks(2, read_chapters) == [[b"0", b"1", b"2"]] * 2


def test_groups_of_a_process_share_the_thread_that_receives() -> None:
    rank_group, groups, counts = RankGroup(0, 1, dist.HashStore()), [], []
    for number in range(6):
        groups.append(open_group(rank_group, f"group{number}", [0], backend="gloo", timeout_s=20.0))
        counts.append(psutil.Process().num_threads())
    assert counts[-1] <= counts[0] + 2 * 5  # those that work: two for each group


def close_one_of_two(rank_group: RankGroup) -> float:
    """Returns a sum that a group makes after another one of the same ranks was closed."""
    monitor = FailureMonitor(rank_group)
    waiter = CollectiveWaiter(monitor, label="a test", timeout_s=20.0)
    first, second = (open_group(rank_group, n, range(rank_group.size), backend="gloo", timeout_s=20.0) for n in "ab")
    total = torch.ones(1000)
    waiter.wait([all_reduce(total, first)])
    close_groups([first])
    del first
    waiter.wait([all_reduce(total, second)])
    monitor.close()
    return total[-1].item()


@pytest.mark.parametrize("name", ["", "TORCH_GLOO_LAZY_INIT", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"])
def test_a_closed_group_does_not_disturb_another(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name:
        monkeypatch.setenv(name, "1")
    assert run_ranks(3, close_one_of_two) == [9.0] * 3
