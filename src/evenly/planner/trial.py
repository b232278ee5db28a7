"""What is worth trying before a plan is made: real steps tell how far the sum of their parts can be trusted."""

from collections.abc import Sequence

from evenly.planner.costs import Works
from evenly.planner.lines import cut_lines, single_lines
from evenly.planner.replica import Crew
from evenly.spec.graph import Graph
from evenly.spec.profile import Profile

PROMISING = 1.15  # a cut whose parts take so much longer than whole networks at most


def group_to_try(ranks: Sequence[int], profile: Profile, graph: Graph) -> list[int]:
    """Returns the ranks of a node that do best with whole networks, by what is known so far; two of them at least."""
    works, batch = Works(graph), profile.batch_size
    free = [device.free_bytes for device in profile.devices]
    lines = single_lines(ranks, works, profile, free, batch, {})
    best = min(lines, key=lambda line: line.least_s(batch), default=None)
    if best is None or best.least_s(batch) == float("inf"):
        return sorted(ranks)
    counts = best.samples(best.least_s(batch))
    found = [crew.ranks[0] for crew, count in zip(best.crews, counts, strict=True) if count]
    fastest = sorted(ranks, key=lambda rank: (profile.devices[rank].step.at(batch), rank))
    return sorted(found if len(found) > 1 else fastest[:2])


def cut_to_try(ranks: Sequence[int], profile: Profile, graph: Graph) -> Crew | None:
    """Returns the ranks of a node, and the layout, of the most promising cut network; None if there is none.

    Promising is one that may be faster than whole networks on each rank, or the only one for which there is memory.
    """
    works, batch = Works(graph), profile.batch_size
    free = [device.free_bytes for device in profile.devices]
    whole_s = min(
        (line.least_s(batch) for line in single_lines(ranks, works, profile, free, batch, {})), default=float("inf")
    )
    seconds = whole_s if whole_s < float("inf") else 0.0
    lines = cut_lines(ranks, works, profile, free, batch, {}, seconds=seconds, samples=batch)
    best = min(lines, key=lambda line: line.least_s(batch), default=None)
    if best is None or best.least_s(batch) >= PROMISING * whole_s:  # or there is no memory for it
        return None
    return max((crew for crew in best.crews if crew.layout is not None), key=lambda crew: len(crew.ranks), default=None)
