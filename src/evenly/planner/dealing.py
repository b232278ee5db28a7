"""The samples that nodes do in some time, and a batch dealt out to them."""

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

from evenly.planner.lines import Line

Groups = dict[int, list[int]]  # equal nodes, by the first of all that are equal to them


def best(lines: Sequence[Line], seconds: float) -> tuple[int, Line | None, list[int]]:
    """Returns the line that does the most samples in this time, with how many each crew does; the first of equals."""
    known: dict[int, int] = {}
    ways = [(line, line.samples(seconds, known)) for line in lines]
    line, samples = max(ways, key=lambda way: sum(way[1]), default=(None, []))
    return sum(samples), line, samples


def capacity(lines: Mapping[int, Sequence[Line]], groups: Groups, seconds: float) -> int:
    """Returns the samples that nodes do together in this time."""
    return sum(len(members) * best(lines[first], seconds)[0] for first, members in groups.items())


def ends(lines: Sequence[Line | None], counts: Sequence[list[int]]) -> list[float]:
    """Returns when each node has finished its samples."""
    return [
        max(line.end_s(place, samples) for place, samples in enumerate(own) if samples)
        for line, own in zip(lines, counts, strict=True)
        if line is not None and any(own)
    ]


def trim(lines: Sequence[Line | None], counts: list[list[int]], batch: int) -> None:
    """Takes away the samples that are too many, each from whoever finishes last; of equals from the later."""
    latest = [
        (-line.end_s(place, samples), -index, -place)
        for index, line in enumerate(lines)
        if line is not None
        for place, samples in enumerate(counts[index])
        if samples
    ]
    heapify(latest)
    for _ in range(sum(map(sum, counts)) - batch):
        index, place = -latest[0][1], -latest[0][2]
        line, counts[index][place] = lines[index], counts[index][place] - 1
        left = counts[index][place]
        ended = -line.end_s(place, left) if line is not None and left else 1.0
        heapreplace(latest, (ended, -index, -place))
