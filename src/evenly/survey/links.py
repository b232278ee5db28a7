"""Links between ranks: latency from the round trip of small messages, bandwidth from large ones, each direction."""

import time
from collections.abc import Callable, Sequence
from math import ceil

import torch

from evenly.comm import CollectiveWaiter, Group, GroupContext, all_to_all, backend_for, open_temporarily
from evenly.spec import Cluster, Link, Rate
from evenly.survey.stopwatch import synchronize_device

LEAST_ROW_S, MOST_ROW_S = 0.01, 0.06  # messages are sent in rows of about such a length: see Stopwatch
SMALL = 1  # float32 numbers in a ping
STREAMS = (1 << 14, 1 << 18, 1 << 20)  # float32 numbers in larger messages: 64 KiB, 1 MiB, 4 MiB


def measure_links(
    context: GroupContext,
    cluster: Cluster,
    device: torch.device,
    pairs: Sequence[tuple[int, int]],
    *,
    enough_s: float,
    tell: Callable[[str], None],
) -> list[Link]:
    """Returns the links between pairs of ranks, one pair after another; the first rank of a pair gets both directions.

    All ranks of the pairs call it with the same list. A rank waits in its next pair for its partner.
    """
    links: list[Link] = []
    rank_group, monitor, waiter = context.rank_group, context.monitor, context.waiter
    for pair in pairs:
        if rank_group.rank not in pair:
            continue
        tell(f"the link between ranks {pair[0]} and {pair[1]}")
        devices = [cluster.device_of(rank) for rank in pair]
        with open_temporarily(
            rank_group,
            f"pair {pair}",
            pair,
            monitor=monitor,
            timeout_s=waiter.timeout_s,
            backend=backend_for(devices),
            devices=devices if cluster.node_of(pair[0]) == cluster.node_of(pair[1]) else None,
        ) as group:
            for source, target in ((0, 1), (1, 0)):
                rate = _Direction(group, waiter, device, source, enough_s=enough_s).rate()
                if rank_group.rank == pair[0]:
                    links.append(Link(source=pair[source], target=pair[target], rate=rate))
    return links


class _Direction:
    """Messages from member `source` of a group of two to the other one."""

    def __init__(
        self, group: Group, waiter: CollectiveWaiter, device: torch.device, source: int, *, enough_s: float
    ) -> None:
        self._group = group
        self._waiter = waiter
        self._device = device
        self._enough_s, self._row_s = enough_s, min(MOST_ROW_S, max(LEAST_ROW_S, enough_s / 4))
        self._source, self._sends = source, group.rank() == source

    def rate(self) -> Rate:
        """Returns latency and bandwidth; larger messages are left out after one that takes longer than `enough_s`."""
        ping_s = self._time(SMALL) / 2
        timings = []
        for count in STREAMS:
            seconds = self._time(count)
            timings.append((4 * count, max(seconds - ping_s, 1e-7)))
            if seconds > self._enough_s:
                break
        (small_bytes, small_s), (large_bytes, large_s) = (
            (timings[-2], timings[-1]) if len(timings) > 1 else ((0, ping_s), timings[-1])
        )
        speed = (large_bytes - small_bytes) / (large_s - small_s) if large_s > small_s else large_bytes / large_s
        return Rate(latency_s=ping_s, bytes_per_s=max(speed, large_bytes / (2 * large_s)))

    def _time(self, count: int) -> float:
        """Returns the mean seconds of a message of `count` numbers and its reply of one number, in a row of them."""
        message, reply = torch.zeros(count, device=self._device), torch.zeros(SMALL, device=self._device)
        repeats, seconds = 1, 0.0
        for _ in range(3):  # the first warms up, the second finds the row length, the third counts
            began = time.perf_counter()
            for _ in range(repeats):
                self._send(message, forward=True)
                self._send(reply, forward=False)
            synchronize_device(self._device)
            seconds = (time.perf_counter() - began) / repeats
            repeats = max(1, min(100, ceil(self._row_s / max(1e-6, self._agreed(seconds)))))
        return self._agreed(seconds)

    def _agreed(self, seconds: float) -> float:
        """Returns the source's measurement on both ranks."""
        return float(self._send(torch.full((SMALL,), seconds, device=self._device), forward=True)[0])

    def _send(self, message: torch.Tensor, *, forward: bool) -> torch.Tensor:
        """Returns the received message on one rank, the sent one on the other."""
        sends = self._sends == forward
        peer = 1 - self._group.rank()
        counts = [message.numel() if member == peer else 0 for member in range(2)]
        nothing = [0, 0]
        received = message.new_empty(0 if sends else message.numel())
        receive_counts, send_counts = (nothing, counts) if sends else (counts, nothing)
        self._waiter.wait(
            [
                all_to_all(
                    received,
                    message if sends else message[:0],
                    receive_counts,
                    send_counts,
                    self._group,
                    largest=message.numel(),
                )
            ]
        )
        return message if sends else received
