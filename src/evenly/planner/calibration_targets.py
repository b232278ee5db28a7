"""Which groups and cuts to time with real steps before planning: they correct what is predicted from layer times."""

from collections.abc import Collection, Iterable, Sequence

from evenly.planner.costs import GraphCosts
from evenly.planner.node_options import WORTH, NodeOption, cut_options, ideal_s, single_options
from evenly.planner.replica_options import ReplicaOption
from evenly.spec.graph import Graph
from evenly.spec.layout import Layout
from evenly.spec.profile import Profile

PROMISING = 1.15  # a cut is tried if it is predicted to take at most this times the fastest step that is known
DOUBTFUL = 2.0  # the same for one whose ranks together could be clearly faster


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


def cut_to_try(
    ranks: Sequence[int], profile: Profile, graph: Graph, *, tried: Collection[Layout] = ()
) -> ReplicaOption | None:
    """Returns the most promising way to cut the network over ranks of a node, but for those `tried`; None without one.

    A cut is promising if it may be faster than a whole network on each rank, or if only cuts fit into memory. The
    first to be tried has as many ranks as possible, even if it is predicted to be slow: its step also tells of smaller
    groups, and how fast ranks are in it is known only then. After it the fastest is tried.
    """
    graph_costs, batch = GraphCosts(graph), profile.batch_size
    free = [device.free_bytes for device in profile.devices]
    whole_s = _whole_s(ranks, graph_costs, profile)
    seconds = whole_s if whole_s < float("inf") else 0.0
    options = cut_options(ranks, graph_costs, profile, free, batch, {}, seconds=seconds, samples=batch)
    step_s = [option.least_s(batch) for option in options]  # infinite without memory for it
    cut_s = min(step_s, default=float("inf"))
    if cut_s == float("inf") or cut_s >= DOUBTFUL * whole_s:
        return None
    if any(set(cut.ranks) <= set(ranks) for cut in profile.cuts):
        fastest = [option for option, seconds in zip(options, step_s, strict=True) if seconds == cut_s]
        return next((each for each in _cuts_in(fastest, free, batch) if each.layout not in tried), None)
    best_s = min(whole_s, cut_s)
    promising = [
        option
        for option, seconds in zip(options, step_s, strict=True)
        if seconds < PROMISING * best_s
        or (seconds < DOUBTFUL * best_s and _hopes(option, graph_costs, profile, best_s))
    ]
    candidates = _cuts_in(promising, free, batch)
    return min(candidates, key=lambda each: (-len(each.ranks), each.seconds(batch)), default=None)


def may_pay(seconds: float, ranks: Sequence[int], profile: Profile, graph: Graph) -> bool:
    """Whether a cut network whose step takes so long may become faster than whole ones with other shares."""
    return seconds < DOUBTFUL * _whole_s(ranks, GraphCosts(graph), profile)


def _whole_s(ranks: Sequence[int], graph_costs: GraphCosts, profile: Profile) -> float:
    """Returns the least time of a step of whole networks; infinite if none fits into memory."""
    free, batch = [device.free_bytes for device in profile.devices], profile.batch_size
    options = single_options(ranks, graph_costs, profile, free, batch, {})
    return min((option.least_s(batch) for option in options), default=float("inf"))


def _cuts_in(options: Iterable[NodeOption], free: Sequence[int], batch: int) -> list[ReplicaOption]:
    """Returns the cut networks of these options that have memory for the whole batch."""
    cuts = [each for option in options for each in option.replica_options if each.layout is not None]
    return [each for each in cuts if each.most_samples(free) >= batch]


def _hopes(option: NodeOption, graph_costs: GraphCosts, profile: Profile, seconds: float) -> bool:
    """Whether one network over these ranks would be clearly faster, were its work divided without loss."""
    if len(option.replica_options) > 1:
        return False
    return WORTH * ideal_s(option.ranks, graph_costs, profile, profile.batch_size) < seconds
