"""Groups over shared memory beside groups over gloo, for ranks that are threads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from evenly.comm import FailureMonitor, MemoryGroup, RankGroup, ShardGroup, open_group, open_group_inside
from evenly.spec import Device
from tests.ranks import run_ranks


def open_memory_group(rank_group: RankGroup, name: str = "memory", *, timeout_s: float = 20.0) -> MemoryGroup:
    """Returns a group of all ranks over shared memory."""
    devices = [Device(kind="cpu")] * rank_group.size
    group = open_group_inside(rank_group, name, range(rank_group.size), devices, timeout_s=timeout_s)
    assert isinstance(group, MemoryGroup)
    return group


@contextmanager
def open_pair(rank_group: RankGroup, *, timeout_s: float = 20.0) -> Iterator[tuple[ShardGroup, ShardGroup]]:
    """Yields the same ranks over gloo and over shared memory."""
    monitor = FailureMonitor(rank_group)
    gloo = open_group(rank_group, "gloo", range(rank_group.size), backend="gloo", timeout_s=timeout_s)
    pair = (
        ShardGroup(gloo, monitor, timeout_s=timeout_s),
        ShardGroup(open_memory_group(rank_group, timeout_s=timeout_s), monitor, timeout_s=timeout_s),
    )
    try:
        yield pair
    except BaseException as error:
        monitor.report(error)
        raise
    finally:
        for shard_group in pair:
            shard_group.close()


def over_memory(count: int, act: Callable[[ShardGroup], Any], *, timeout_s: float = 20.0) -> list[Any]:
    """Returns what every rank of a group over shared memory gives."""

    def run(rank_group: RankGroup) -> Any:
        monitor = FailureMonitor(rank_group)
        shard_group = ShardGroup(open_memory_group(rank_group), monitor, timeout_s=timeout_s)
        try:
            return act(shard_group)
        except BaseException as error:
            monitor.report(error)
            raise
        finally:
            shard_group.close()

    return run_ranks(count, run)
