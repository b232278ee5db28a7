"""The samples that nodes do in some time, and a batch dealt out to them."""

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

from evenly.planner.node_options import NodeOption

Groups = dict[int, list[int]]  # equal nodes, by the first of all that are equal to them


def best(options: Sequence[NodeOption], seconds: float) -> tuple[int, NodeOption | None, list[int]]:
    """Returns the line that does the most samples in this time, with how many each crew does; the first of equals."""
    samples_by_kind: dict[int, int] = {}
    candidates = [(option, option.samples(seconds, samples_by_kind)) for option in options]
    option, samples = max(candidates, key=lambda candidate: sum(candidate[1]), default=(None, []))
    return sum(samples), option, samples


def capacity(options: Mapping[int, Sequence[NodeOption]], groups: Groups, seconds: float) -> int:
    """Returns the samples that nodes do together in this time."""
    return sum(len(members) * best(options[first], seconds)[0] for first, members in groups.items())


def ends(options: Sequence[NodeOption | None], counts: Sequence[list[int]]) -> list[float]:
    """Returns when each node has finished its samples."""
    return [
        max(option.end_s(position, samples) for position, samples in enumerate(node_counts) if samples)
        for option, node_counts in zip(options, counts, strict=True)
        if option is not None and any(node_counts)
    ]


def trim(options: Sequence[NodeOption | None], counts: list[list[int]], batch: int) -> None:
    """Takes away the samples that are too many, each from whoever finishes last; of equals from the later."""
    latest = [
        (-option.end_s(position, samples), -index, -position)
        for index, option in enumerate(options)
        if option is not None
        for position, samples in enumerate(counts[index])
        if samples
    ]
    heapify(latest)
    for _ in range(sum(map(sum, counts)) - batch):
        index, position = -latest[0][1], -latest[0][2]
        option, counts[index][position] = options[index], counts[index][position] - 1
        remaining = counts[index][position]
        negative_end_s = -option.end_s(position, remaining) if option is not None and remaining else 1.0
        heapreplace(latest, (negative_end_s, -index, -position))
