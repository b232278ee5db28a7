"""The samples that nodes do in some time, and a batch dealt out to them."""

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

from evenly.planner.node_options import NodeOption

Groups = dict[int, list[int]]  # equal nodes, by the first of all that are equal to them


def best(lines: Sequence[NodeOption], seconds: float) -> tuple[int, NodeOption | None, list[int]]:
    """Returns the line that does the most samples in this time, with how many each crew does; the first of equals."""
    known: dict[int, int] = {}
    ways = [(option, option.samples(seconds, known)) for option in lines]
    option, samples = max(ways, key=lambda way: sum(way[1]), default=(None, []))
    return sum(samples), option, samples


def capacity(lines: Mapping[int, Sequence[NodeOption]], groups: Groups, seconds: float) -> int:
    """Returns the samples that nodes do together in this time."""
    return sum(len(members) * best(lines[first], seconds)[0] for first, members in groups.items())


def ends(lines: Sequence[NodeOption | None], counts: Sequence[list[int]]) -> list[float]:
    """Returns when each node has finished its samples."""
    return [
        max(option.end_s(place, samples) for place, samples in enumerate(own) if samples)
        for option, own in zip(lines, counts, strict=True)
        if option is not None and any(own)
    ]


def trim(lines: Sequence[NodeOption | None], counts: list[list[int]], batch: int) -> None:
    """Takes away the samples that are too many, each from whoever finishes last; of equals from the later."""
    latest = [
        (-option.end_s(place, samples), -index, -place)
        for index, option in enumerate(lines)
        if option is not None
        for place, samples in enumerate(counts[index])
        if samples
    ]
    heapify(latest)
    for _ in range(sum(map(sum, counts)) - batch):
        index, place = -latest[0][1], -latest[0][2]
        option, counts[index][place] = lines[index], counts[index][place] - 1
        left = counts[index][place]
        ended = -option.end_s(place, left) if option is not None and left else 1.0
        heapreplace(latest, (ended, -index, -place))
