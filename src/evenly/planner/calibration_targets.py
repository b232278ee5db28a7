"""What is worth trying before a plan is made: real steps tell how far the sum of their parts can be trusted."""

from collections.abc import Sequence

from evenly.planner.costs import GraphCosts
from evenly.planner.node_options import cut_options, single_options
from evenly.planner.replica_options import ReplicaOption
from evenly.spec.graph import Graph
from evenly.spec.profile import Profile

PROMISING = 1.15  # a cut whose parts take so much longer than whole networks at most


def group_to_try(ranks: Sequence[int], profile: Profile, graph: Graph) -> list[int]:
    """Returns the ranks of a node that do best with whole networks, by what is known so far; two of them at least."""
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
    """Returns the ranks of a node, and the layout, of the most promising cut network; None if there is none.

    Promising is one that may be faster than whole networks on each rank, or the only one for which there is memory.
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
