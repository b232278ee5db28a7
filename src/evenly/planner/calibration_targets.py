"""Which groups and cuts to time with real steps before planning: they correct what is predicted from layer times."""

from collections.abc import Sequence

from evenly.planner.costs import GraphCosts
from evenly.planner.node_options import cut_options, single_options
from evenly.planner.replica_options import ReplicaOption
from evenly.spec.graph import Graph
from evenly.spec.profile import Profile

PROMISING = 1.15  # a cut is tried if it is predicted to take at most this times the step of whole networks


def group_to_try(ranks: Sequence[int], profile: Profile, graph: Graph) -> list[int]:
    """Returns the ranks of a node, at least two, that are predicted to be fastest with a whole network each."""
    graph_costs, batch = GraphCosts(graph), profile.batch_size
    free = [device.free_bytes for device in profile.devices]
    options = single_options(ranks, graph_costs, profile, free, batch, {})
    best = min(options, key=lambda option: option.least_s(batch), default=None)
    if best is None or best.least_s(batch) == float("inf"):
        return sorted(ranks)
    counts = best.samples(best.least_s(batch))
    busy_ranks = [
        replica_option.ranks[0] for replica_option, count in zip(best.replica_options, counts, strict=True) if count
    ]
    fastest = sorted(ranks, key=lambda rank: (profile.devices[rank].step.at(batch), rank))
    return sorted(busy_ranks if len(busy_ranks) > 1 else fastest[:2])


def cut_to_try(ranks: Sequence[int], profile: Profile, graph: Graph) -> ReplicaOption | None:
    """Returns the most promising way to cut the network over ranks of a node; None if there is none.

    A cut is promising if it may be faster than a whole network on each rank, or if only it fits into memory.
    """
    graph_costs, batch = GraphCosts(graph), profile.batch_size
    free = [device.free_bytes for device in profile.devices]
    whole_s = min(
        (option.least_s(batch) for option in single_options(ranks, graph_costs, profile, free, batch, {})),
        default=float("inf"),
    )
    seconds = whole_s if whole_s < float("inf") else 0.0
    options = cut_options(ranks, graph_costs, profile, free, batch, {}, seconds=seconds, samples=batch)
    best = min(options, key=lambda option: option.least_s(batch), default=None)
    if best is None or best.least_s(batch) >= PROMISING * whole_s:  # or there is no memory for it
        return None
    return max(
        (replica_option for replica_option in best.replica_options if replica_option.layout is not None),
        key=lambda replica_option: len(replica_option.ranks),
        default=None,
    )
