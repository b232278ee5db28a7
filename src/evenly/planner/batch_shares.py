"""How many samples nodes can process in a given time, and how a global batch is divided over them."""

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

from evenly.planner.node_options import NodeOption

Groups = dict[int, list[int]]  # the nodes that are equal, by the first of them


def best(options: Sequence[NodeOption], seconds: float) -> tuple[int, NodeOption | None, list[int]]:
    """Returns the option with the most samples in this time, and the samples of each replica; ties: the first."""
    samples_by_kind: dict[int, int] = {}
    candidates = [(option, option.samples(seconds, samples_by_kind)) for option in options]
    option, samples = max(candidates, key=lambda candidate: sum(candidate[1]), default=(None, []))
    return sum(samples), option, samples


def capacity(options: Mapping[int, Sequence[NodeOption]], groups: Groups, seconds: float) -> int:
    """Returns the samples that all nodes together can process in this time."""
    return sum(len(members) * best(options[first], seconds)[0] for first, members in groups.items())


def ends(options: Sequence[NodeOption | None], counts: Sequence[list[int]]) -> list[float]:
    """Returns the seconds after which each node has finished its samples."""
    return [
        max(option.end_s(position, samples) for position, samples in enumerate(node_counts) if samples)
        for option, node_counts in zip(options, counts, strict=True)
        if option is not None and any(node_counts)
    ]


def trim(options: Sequence[NodeOption | None], counts: list[list[int]], batch: int) -> None:
    """Removes surplus samples one by one, each from the replica that finishes last; ties: from the later one."""
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
