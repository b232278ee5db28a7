"""How long ranks of a node need to sum and to gather a tensor together, against its bytes."""

import time
from collections.abc import Callable, Sequence
from math import ceil

import torch

from evenly.comm import GroupContext, ShardGroup, open_temporarily
from evenly.spec import Cluster, CollectiveTimings, Curve
from evenly.survey.stopwatch import synchronize_device

SIZES = (1 << 12, 1 << 18, 1 << 21)  # bytes: 4 KiB, 256 KiB, 2 MiB


def measure_collectives(
    context: GroupContext,
    groups: Sequence[Sequence[int]],
    *,
    cluster: Cluster,
    device: torch.device,
    row_s: float,
    tell: Callable[[str], None],
) -> list[CollectiveTimings]:
    """Returns the collective timings of each group, on its first rank; groups are measured one after another.

    Collectives are repeated for about `row_s`: see `Stopwatch`.
    """
    timings = []
    rank_group, monitor, timeout_s = context.rank_group, context.monitor, context.waiter.timeout_s
    for ranks in groups:
        if rank_group.rank not in ranks:
            continue
        tell(f"ranks {list(ranks)} summing and gathering")
        name, devices = f"collectives {list(ranks)}", [cluster.device_of(rank) for rank in ranks]
        with open_temporarily(rank_group, name, ranks, monitor=monitor, timeout_s=timeout_s, devices=devices) as group:
            group_timings = _CollectiveTimer(ShardGroup(group, monitor, timeout_s=timeout_s), device, row_s).timings(
                ranks
            )
        if rank_group.rank == ranks[0]:
            timings.append(group_timings)
    return timings


class _CollectiveTimer:
    """Times collectives of different sizes in one process group."""

    def __init__(self, shard_group: ShardGroup, device: torch.device, row_s: float) -> None:
        self._shard_group = shard_group
        self._device = device
        self._row_s = row_s

    def timings(self, ranks: Sequence[int]) -> CollectiveTimings:
        """Returns the seconds of sums and gathers."""
        sums = [self._time(self._sum(size)) for size in SIZES]
        gathers = [self._time(self._gather(size)) for size in SIZES]
        return CollectiveTimings(
            ranks=tuple(ranks),
            sums=Curve(sizes=SIZES, seconds=tuple(sums)),
            gathers=Curve(sizes=SIZES, seconds=tuple(gathers)),
        )

    def _sum(self, size: int) -> Callable[[], object]:
        x = torch.zeros(size // 4, device=self._device)
        return lambda: self._shard_group.sum(x).wait()

    def _gather(self, size: int) -> Callable[[], object]:
        """Returns a gather of equal parts; a row has 32 numbers."""
        rows = size // 128
        edges = [rows * rank // self._shard_group.size for rank in range(self._shard_group.size + 1)]
        segments = [((edges[rank], edges[rank + 1]),) for rank in range(self._shard_group.size)]
        local_rows = torch.zeros(
            edges[self._shard_group.rank + 1] - edges[self._shard_group.rank], 32, device=self._device
        )
        return lambda: self._shard_group.gather(local_rows, 0, segments).wait()

    def _time(self, work: Callable[[], object]) -> float:
        """Returns the mean seconds of a collective in a row of them; the longest of all ranks."""
        repeats, seconds = 1, 0.0
        for _ in range(3):  # the first warms up, the second finds the row length, the third counts
            began = time.perf_counter()
            for _ in range(repeats):
                work()
            synchronize_device(self._device)
            local_seconds = torch.tensor([(time.perf_counter() - began) / repeats], device=self._device)
            seconds = float(self._shard_group.sum(local_seconds, largest=True).wait()[0])
            repeats = max(1, min(100, ceil(self._row_s / max(1e-6, seconds))))
        return max(seconds, 1e-9)
