"""The ways between ranks: latency from small messages there and back, bandwidth from large ones, in each direction."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from evenly.comm import Waiter, receive, send
from evenly.spec import Lane, Rate

SMALL = 1  # float32 numbers in a ping
STREAMS = (1 << 14, 1 << 18, 1 << 20)  # float32 numbers in larger messages: 64 KiB, 1 MiB, 4 MiB


def measure_lanes(
    group: dist.ProcessGroup,
    waiter: Waiter,
    device: torch.device,
    pairs: Sequence[tuple[int, int]],
    *,
    enough_s: float,
    tell: Callable[[str], None],
) -> list[tuple[int, int, Rate]]:
    """Returns the ways between pairs of the group's members, one pair after another, both directions each.

    All members call it; those that are not of a pair wait in the next message they take part in.
    """
    found: list[tuple[int, int, Rate]] = []
    for a, b in pairs:
        if group.rank() not in (a, b):
            continue
        tell(f"the way between members {a} and {b}")
        for source, target in ((a, b), (b, a)):
            rate = _direction(group, waiter, device, source, target, enough_s)
            if group.rank() == a:
                found.append((source, target, rate))
    return found


def _direction(
    group: dist.ProcessGroup, waiter: Waiter, device: torch.device, source: int, target: int, enough_s: float
) -> Rate:
    ping_s = _time(group, waiter, device, source, target, SMALL, repeats=12) / 2
    points = []
    for count in STREAMS:
        seconds = _time(group, waiter, device, source, target, count, repeats=3)
        points.append((4 * count, max(seconds - ping_s, 1e-7)))
        if _agreed_max(group, waiter, device, source, target, seconds) > enough_s:
            break
    (few, quick), (many, slow) = (points[-2], points[-1]) if len(points) > 1 else ((0, ping_s), points[-1])
    speed = (many - few) / (slow - quick) if slow > quick else many / slow
    return Rate(latency_s=ping_s, bytes_per_s=max(speed, many / (2 * slow)))


def _time(
    group: dist.ProcessGroup, waiter: Waiter, device: torch.device, source: int, target: int, count: int, repeats: int
) -> float:
    """Returns the median seconds of a message of `count` numbers and its answer of one; both ends know it alike."""
    load, answer = torch.zeros(count, device=device), torch.zeros(SMALL, device=device)
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        if group.rank() == source:
            waiter.wait([send(load, group, target=target)])
            waiter.wait([receive(answer, group, source=target)])
        else:
            waiter.wait([receive(load, group, source=source)])
            waiter.wait([send(answer, group, target=source)])
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def _agreed_max(
    group: dist.ProcessGroup, waiter: Waiter, device: torch.device, source: int, target: int, seconds: float
) -> float:
    """Returns what the source measured, at both ends."""
    said = torch.full((SMALL,), seconds, device=device)
    if group.rank() == source:
        waiter.wait([send(said, group, target=target)])
    else:
        waiter.wait([receive(said, group, source=source)])
    return float(said[0])


def lanes_of(found: Sequence[tuple[int, int, Rate]], ranks: Sequence[int]) -> list[Lane]:
    """Returns the ways with the members' ranks in the party."""
    return [Lane(source=ranks[source], target=ranks[target], rate=rate) for source, target, rate in found]
