"""Distributes whole units over devices so that the slowest device finishes as early as possible."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from itertools import groupby

from evenly.errors import SpecError

Seconds = Callable[[int], float]
LARGE = 400_000  # entries of the table of times; for more, times are assumed to grow with the size


def balance(units: int, seconds: Sequence[Seconds], limits: Sequence[int] | None = None) -> list[int]:
    """Returns the units of each device, c_r, with sum_r c_r = units, for which max_r T_r(c_r) is least.

    A device without units takes no time. Times need not grow with the size (odd widths can be slower than larger
    even ones); only if the table of times is very large is this assumed.

    Args:
        units: how many to distribute.
        seconds: for each device the time T_r of c units.
        limits: the most units that each device can hold.

    >>> balance(10, [lambda c: c, lambda c: 4 * c])
    [8, 2]
    """
    most = [units] * len(seconds) if limits is None else [min(units, max(0, limit)) for limit in limits]
    if sum(most) < units:
        raise SpecError(
            f"{units} units were to be distributed over devices that hold at most {most}, {units - sum(most)} too few. "
            "Add a device, or give them more memory."
        )
    if sum(most) > LARGE:
        return _steadily(units, seconds, most)
    tables = [[0.0] + [times(count) for count in range(1, top + 1)] for times, top in zip(seconds, most, strict=True)]
    order = sorted(range(len(tables)), key=lambda r: tables[r][-1] / max(1, len(tables[r]) - 1))  # fastest first
    bounds = sorted({value for table in tables for value in table})
    best = bisect_left(
        range(len(bounds)), True, key=lambda i: bool(_reach(units, tables, order, bounds[i])[-1] >> units & 1)
    )
    reach, remaining = _reach(units, tables, order, bounds[best]), units
    counts = [0] * len(tables)
    for position in range(len(order) - 1, -1, -1):  # the slowest gets what the others cannot take
        table = tables[order[position]]
        fits = (c for c, value in enumerate(table) if value <= bounds[best] and c <= remaining)
        counts[order[position]] = next(c for c in fits if reach[position] >> (remaining - c) & 1)
        remaining -= counts[order[position]]
    return counts


def _reach(units: int, tables: Sequence[Sequence[float]], order: Sequence[int], bound: float) -> list[int]:
    """Returns the sums that the first 0, 1, 2, ... devices can make within the bound, as bits of whole numbers."""
    mask, sums = (1 << (units + 1)) - 1, [1]
    for rank in order:
        reached, start = 0, 0
        for fits, run in groupby(tables[rank], key=lambda value: value <= bound):
            length = len(list(run))
            reached |= _smeared(sums[-1], length) << start if fits else 0
            start += length
        sums.append(reached & mask)
    return sums


def _smeared(bits: int, length: int) -> int:
    """Returns the union of the bits shifted by 0, 1, ..., length - 1 places."""
    done = 1
    while done < length:
        step = min(done, length - done)
        bits |= bits << step
        done += step
    return bits


def _steadily(units: int, seconds: Sequence[Seconds], most: Sequence[int]) -> list[int]:
    """Returns the same by bisection on the time, for times that grow with the size."""
    low, high = 0.0, max(times(top) for times, top in zip(seconds, most, strict=True) if top)
    for _ in range(60):
        middle = (low + high) / 2
        enough = sum(largest(times, top, middle) for times, top in zip(seconds, most, strict=True)) >= units
        low, high = (low, middle) if enough else (middle, high)
    counts = [largest(times, top, high) for times, top in zip(seconds, most, strict=True)]
    ends = [(-seconds[rank](count), rank) for rank, count in enumerate(counts) if count]
    heapify(ends)
    for _ in range(sum(counts) - units):  # surplus units are taken from the device that finishes last
        _, rank = ends[0]
        counts[rank] -= 1
        heapreplace(ends, (-seconds[rank](counts[rank]) if counts[rank] else 1.0, rank))
    return counts


def largest(times: Seconds, top: int, bound: float) -> int:
    """Returns the most units, up to `top`, that take at most `bound` seconds, for times that grow with the size."""
    return bisect_left(range(1, top + 1), True, key=lambda count: times(count) > bound)
