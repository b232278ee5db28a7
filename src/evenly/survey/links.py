"""The ways between ranks: latency from small messages there and back, bandwidth from large ones, in each direction."""

import time
from collections.abc import Callable, Sequence
from math import ceil

import torch
import torch.distributed as dist

from evenly.comm import CollectiveWaiter, GroupContext, all_to_all, open_temporarily
from evenly.spec import Link, Rate
from evenly.survey.stopwatch import finish

LEAST_ROW_S, MOST_ROW_S = 0.01, 0.06  # messages are sent in rows of about such a length: see Stopwatch
SMALL = 1  # float32 numbers in a ping
STREAMS = (1 << 14, 1 << 18, 1 << 20)  # float32 numbers in larger messages: 64 KiB, 1 MiB, 4 MiB


def measure_links(
    context: GroupContext,
    device: torch.device,
    pairs: Sequence[tuple[int, int]],
    *,
    backend: str,
    enough_s: float,
    tell: Callable[[str], None],
) -> list[Link]:
    """Returns the ways between pairs of ranks, one pair after another; the first rank of a pair has both directions.

    All ranks of the pairs call it with the same list. A rank waits in its next pair until its partner comes.
    """
    found: list[Link] = []
    rank_group, monitor, waiter = context.rank_group, context.monitor, context.waiter
    for pair in pairs:
        if rank_group.rank not in pair:
            continue
        tell(f"the way between ranks {pair[0]} and {pair[1]}")
        name, timeout_s = f"pair {pair}", waiter.timeout_s
        with open_temporarily(rank_group, name, pair, monitor=monitor, backend=backend, timeout_s=timeout_s) as group:
            for source, target in ((0, 1), (1, 0)):
                rate = _Direction(group, waiter, device, source, enough_s=enough_s).rate()
                if rank_group.rank == pair[0]:
                    found.append(Link(source=pair[source], target=pair[target], rate=rate))
    return found


class _Direction:
    """Messages from member `source` of a group of two to the other one."""

    def __init__(
        self, group: dist.ProcessGroup, waiter: CollectiveWaiter, device: torch.device, source: int, *, enough_s: float
    ) -> None:
        self._group = group
        self._waiter = waiter
        self._device = device
        self._enough_s, self._row_s = enough_s, min(MOST_ROW_S, max(LEAST_ROW_S, enough_s / 4))
        self._source, self._sends = source, group.rank() == source

    def rate(self) -> Rate:
        """Returns latency and bandwidth; no larger messages follow one that takes longer than is enough."""
        ping_s = self._time(SMALL) / 2
        points = []
        for count in STREAMS:
            seconds = self._time(count)
            points.append((4 * count, max(seconds - ping_s, 1e-7)))
            if seconds > self._enough_s:
                break
        (few, quick), (many, slow) = (points[-2], points[-1]) if len(points) > 1 else ((0, ping_s), points[-1])
        speed = (many - few) / (slow - quick) if slow > quick else many / slow
        return Rate(latency_s=ping_s, bytes_per_s=max(speed, many / (2 * slow)))

    def _time(self, count: int) -> float:
        """Returns the seconds of a message of `count` numbers and its answer of one, in a row of such."""
        load, answer = torch.zeros(count, device=self._device), torch.zeros(SMALL, device=self._device)
        times, seconds = 1, 0.0
        for _ in range(3):  # warms up, tells how many make a row, counts
            began = time.perf_counter()
            for _ in range(times):
                self._send(load, there=True)
                self._send(answer, there=False)
            finish(self._device)
            seconds = (time.perf_counter() - began) / times
            times = max(1, min(100, ceil(self._row_s / max(1e-6, self._agreed(seconds)))))
        return self._agreed(seconds)

    def _agreed(self, seconds: float) -> float:
        """Returns what the source measured, at both ends."""
        return float(self._send(torch.full((SMALL,), seconds, device=self._device), there=True)[0])

    def _send(self, load: torch.Tensor, *, there: bool) -> torch.Tensor:
        """Returns what arrived, or was sent."""
        sends = self._sends == there
        other = 1 - self._group.rank()
        counts = [load.numel() if member == other else 0 for member in range(2)]
        nothing = [0, 0]
        received = load.new_empty(0 if sends else load.numel())
        takes, gives = (nothing, counts) if sends else (counts, nothing)
        self._waiter.wait([all_to_all(received, load if sends else load[:0], takes, gives, self._group)])
        return load if sends else received
