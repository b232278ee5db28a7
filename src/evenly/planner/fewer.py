"""Whether fewer nodes are faster: each one more takes part in the work, and in every exchange."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from evenly.spec.exchange import Exchange
from evenly.spec.period import Adaptive, EveryGradient, EverySeconds, EverySteps, Period


def mean_step_s(period: Period, exchange: Exchange, *, step_s: float, exchange_s: float) -> float:
    """Returns the seconds of a step with its part of what exchanges hold up.

    Where it is not known how many steps lie between two (an epoch of a length that nobody said, a wish for drift) they
    count for nothing.

    >>> mean_step_s(EverySteps(4), Exchange(), step_s=0.1, exchange_s=0.2)
    0.15000000000000002
    """
    match period:
        case EveryGradient():
            return step_s + exchange_s
        case EverySteps(steps=number):
            steps = number
        case Adaptive(start=number, drift=None):
            steps = number
        case EverySeconds(seconds=seconds):
            steps = max(1, int(seconds / step_s))
        case _:
            return step_s
    return step_s + max(0.0, exchange_s - exchange.hidden_steps(steps) * step_s) / steps


def smaller_sets(
    strong: Mapping[int, int], able: Mapping[int, int], wires: Mapping[int, float], batch: int
) -> Iterator[frozenset[int]]:
    """Returns sets of nodes, fewer than all, that can do the work: the strongest of them, and those with fast wires.

    Args:
        strong: the samples that each node can do while all take part.
        able: those that it can do in the time that is to be beaten.
        wires: bytes a second of the best way from a node to another one, where they are known.
        batch: the samples to do.
    """
    orders = [sorted(strong, key=lambda node: (-strong[node], node))]
    if wires:
        orders.append(sorted(strong, key=lambda node: (-wires.get(node, 0.0), -strong[node], node)))
    seen = set()
    for order in orders:
        for size in _sizes([*accumulate(able[node] for node in order)], batch):
            chosen = frozenset(order[:size])
            if chosen not in seen:
                seen.add(chosen)
                yield chosen


def _sizes(totals: Sequence[int], batch: int) -> list[int]:
    """Returns the least number of nodes that is enough, some near it and some near all, further apart in between."""
    most = len(totals)
    least = next((size for size, total in enumerate(totals, start=1) if total >= batch), most)
    gaps = [2**power for power in range(most.bit_length())]
    near = {least, *(least + gap for gap in gaps), *(most - gap for gap in gaps)}
    return sorted(size for size in near if least <= size < most)
