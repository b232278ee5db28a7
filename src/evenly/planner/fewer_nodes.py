"""Whether fewer nodes are faster: every additional node shares the work, but makes every exchange slower."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, combinations

from evenly.spec.cluster import Cluster
from evenly.spec.exchange import Exchange
from evenly.spec.period import Adaptive, EveryGradient, EverySeconds, EverySteps, Period
from evenly.spec.profile import Profile

FEW = 8  # up to so many nodes, all sets are tried
STARTS = 4  # strong nodes, and sites, from which sets of nearby nodes are grown
SITE = 2  # a node this many times farther than the nearest one is at another site
ALL = 32  # up to so many sizes of sets, all are tried

Distances = dict[int, dict[int, float]]  # seconds from node to node


def mean_step_s(period: Period, exchange: Exchange, *, step_s: float, exchange_s: float) -> float:
    """Returns the seconds of a step including its part of the time that exchanges block.

    Exchanges are ignored if the number of steps between two is not known (an epoch, a target for drift).

    >>> mean_step_s(EverySteps(4), Exchange(), step_s=0.25, exchange_s=0.5)
    0.375
    """
    match period:
        case EveryGradient():
            return step_s + exchange_s
        case EverySteps(steps=number):
            steps = number
        case Adaptive(start=number, drift=None):
            steps = number
        case EverySeconds():
            steps = period.steps(step_s)
        case _:
            return step_s
    return step_s + max(0.0, exchange_s - exchange.hidden_steps(steps) * step_s) / steps


def distances(cluster: Cluster, profile: Profile, size_bytes: int) -> Distances:
    """Returns the seconds of a message of this size between nodes, where measured; the slower direction."""
    nodes = {node.ranks[0]: index for index, node in enumerate(cluster.nodes)}
    seconds_by_node: Distances = {}
    for link in profile.lanes:
        if link.source in nodes and link.target in nodes:
            seconds = link.rate.latency_s + size_bytes / link.rate.bytes_per_s
            a, b = nodes[link.source], nodes[link.target]
            for one, other in ((a, b), (b, a)):
                neighbours = seconds_by_node.setdefault(one, {})
                neighbours[other] = max(seconds, neighbours.get(other, 0.0))
    return seconds_by_node


def try_sets(
    strong: Mapping[int, int],
    able: Mapping[int, int],
    far: Distances,
    batch: int,
    mean_of: Callable[[frozenset[int]], float],
) -> None:
    """Calls `mean_of` for sets of fewer nodes that can process the batch: the strongest nodes, and nearby ones.

    If all links are alike, the strongest nodes are the best set of each size. If not, all sets of few nodes are tried.

    Args:
        strong: the samples that each node can process while all take part.
        able: the samples that it can process in the time that fewer nodes must beat.
        far: seconds from node to node, where they are known.
        batch: the samples of the global batch.
        mean_of: returns the mean step of a set.
    """
    for order in _orders(sorted(strong, key=lambda node: (-strong[node], node)), far):
        totals = [*accumulate(able[node] for node in order)]
        least = next((size for size, total in enumerate(totals, start=1) if total >= batch), len(order))
        sizes, means = _sizes(least, len(order)), dict[int, float]()
        while sizes:
            means |= {size: mean_of(frozenset(order[:size])) for size in sizes}
            sizes = _between(means, len(order))
    for size in range(1, len(strong)) if far and len(strong) <= FEW else ():
        for nodes in combinations(sorted(strong), size):
            if sum(able[node] for node in nodes) >= batch:
                mean_of(frozenset(nodes))


def _orders(nodes: Sequence[int], far: Distances) -> Iterator[Sequence[int]]:
    """Yields orders in which to add nodes: as they are, and from each start always the nearest to all before."""
    yield nodes
    for start in _starts(nodes, far) if far else ():
        order, rest = [start], [node for node in nodes if node != start]
        away = {node: far.get(node, {}).get(start, 0.0) for node in rest}
        while rest:
            nearest = min(rest, key=lambda node: away[node] or _nearest_s(node, far))
            order.append(nearest)
            rest.remove(nearest)
            for node in rest:
                away[node] = max(away[node], far.get(node, {}).get(nearest, 0.0))
        yield order


def _starts(nodes: Sequence[int], far: Distances) -> list[int]:
    """Returns the strongest nodes, and one of each site: a node with near neighbours, far from the sites before."""
    sites: list[int] = []
    for node in sorted(nodes, key=lambda node: _nearest_s(node, far)):  # those with fast links, the strongest first
        apart = [far.get(node, {}).get(start, 0.0) for start in sites]
        if len(sites) < STARTS and all(seconds > SITE * _nearest_s(node, far) for seconds in apart):
            sites.append(node)
    return list(dict.fromkeys([*nodes[:STARTS], *sites]))


def _nearest_s(node: int, far: Distances) -> float:
    return min(far.get(node, {}).values(), default=float("inf"))


def _sizes(least: int, most: int) -> list[int]:
    """Returns sizes from `least` to below `most`: all if they are few, else dense near both ends."""
    if most - least <= ALL:
        return list(range(least, most))
    offsets = [2**power for power in range(most.bit_length())]
    near = {
        least,
        *(least + offset for offset in offsets),
        *(most - offset for offset in offsets),
    }
    return sorted(size for size in near if least <= size < most)


def _between(means: Mapping[int, float], most: int) -> list[int]:
    """Returns the sizes half way between the best one and its neighbours that are not in `means` yet."""
    best_size = min(means, key=lambda size: (means[size], -size))
    neighbours = [max((size for size in means if size < best_size), default=best_size)]
    neighbours.append(min((size for size in means if size > best_size), default=most))
    return sorted({(best_size + other) // 2 for other in neighbours} - means.keys())
