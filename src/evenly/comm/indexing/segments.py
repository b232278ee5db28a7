"""Indices of a dim that a rank holds, as ranges: counted, intersected, taken out of tensors and put into them."""

from collections.abc import Sequence
from itertools import accumulate

import torch

Segments = Sequence[tuple[int, int]]


def count_of(ranges: Segments) -> int:
    """Returns how many indices the ranges hold."""
    return sum(stop - start for start, stop in ranges)


def shared(some: Segments, others: Segments) -> Segments:
    """Returns the indices that are in both, in the order of `others`.

    >>> shared(((0, 4), (8, 10)), ((2, 9),))
    ((2, 4), (8, 9))
    """
    common = ((max(a, c), min(b, d)) for c, d in others for a, b in sorted(some))
    return tuple((start, stop) for start, stop in common if start < stop)


def local_positions(held_segments: Segments, ranges: Segments) -> Segments:
    """Returns the local positions of `ranges` on a rank that holds `held_segments`; each range lies in one of them.

    >>> local_positions(((0, 4), (8, 10)), ((2, 4), (8, 9)))
    ((2, 4), (4, 5))
    """
    starts = dict(zip(held_segments, accumulate([0, *(stop - start for start, stop in held_segments)]), strict=False))
    positions = []
    for start, stop in ranges:
        home = next(segment for segment in held_segments if segment[0] <= start and stop <= segment[1])
        positions.append((starts[home] + start - home[0], starts[home] + stop - home[0]))
    return tuple(positions)


def take(x: torch.Tensor, dim: int, ranges: Segments) -> torch.Tensor:
    """Returns the indices `ranges` of `dim`, in that order, contiguous."""
    return part_of(x, dim, ranges).contiguous()


def part_of(x: torch.Tensor, dim: int, ranges: Segments) -> torch.Tensor:
    """Returns the indices `ranges` of `dim`, in that order; a view where they are one range."""
    if len(ranges) > 1:
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    start, stop = ranges[0] if ranges else (0, 0)
    return x.narrow(dim, start, stop - start)


def put(whole: torch.Tensor, piece: torch.Tensor, dim: int, ranges: Segments) -> None:
    """Writes `piece` to the indices `ranges` of `dim`."""
    offset = 0
    for start, stop in ranges:
        whole.narrow(dim, start, stop - start).copy_(piece.narrow(dim, offset, stop - start))
        offset += stop - start


def sliced(held_segments: Segments, start: int, stop: int) -> Segments:
    """Returns the indices at the local positions `start` to `stop` of a rank that holds `held_segments`.

    >>> sliced(((0, 4), (8, 10)), 3, 5)
    ((3, 4), (8, 9))
    """
    ranges, offset = [], 0
    for first, last in held_segments:
        low, high = max(start - offset, 0), min(stop - offset, last - first)
        if low < high:
            ranges.append((first + low, first + high))
        offset += last - first
    return tuple(ranges)
