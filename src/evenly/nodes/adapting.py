"""How long the next period should be, from what all ranks have measured."""

from dataclasses import dataclass
from math import ceil

from evenly.spec import Adaptive, Exchange

CHANGE = 2.0  # a period grows or shrinks at most by this factor where drift decides


@dataclass(frozen=True)
class Seen:
    """What the slowest of all ranks saw: seconds of a step and of an exchange under way, and the largest drift."""

    step_s: float = 0.0
    transfer_s: float = 0.0
    drift: float = 0.0


def choose(period: Adaptive, exchange: Exchange, now: int, seen: Seen) -> tuple[int, str]:
    """Returns the steps of the next period, of which one has `now`, and why.

    >>> choose(Adaptive(exchange_budget=0.1), Exchange(), 4, Seen(step_s=0.1, transfer_s=0.2))
    (18, 'an exchange takes 0.2 s, a step 0.1 s, and exchanges may take 10 % of the time')
    """
    least = max(1, exchange.overlap, exchange.fragments)
    if not seen.step_s:
        return now, "nothing was measured yet"
    if period.exchange_budget is not None:
        steps, why = _affordable(exchange, period.exchange_budget, seen)
    elif period.drift is None or not seen.drift:
        return now, "nodes have not gone apart"
    else:
        factor = min(CHANGE, max(1 / CHANGE, period.drift / seen.drift))
        steps = round(now * factor)
        why = f"nodes went {seen.drift:.2g} of the length of the parameters apart, and may go {period.drift:.2g}"
    return min(max(least, steps), period.most), why


def _affordable(exchange: Exchange, budget: float, seen: Seen) -> tuple[int, str]:
    """What overlaps with steps costs nothing as long as it ends in time; the wire must be free for the next one."""
    waiting_s = max(0.0, seen.transfer_s - exchange.overlap * seen.step_s)
    steps = ceil(exchange.fragments * waiting_s * (1 - budget) / (seen.step_s * budget))
    busy = ceil(exchange.fragments * seen.transfer_s / seen.step_s) if exchange.overlap else 0
    beside = f", beside {exchange.overlap} steps" if exchange.overlap else ""
    why = (
        f"an exchange takes {seen.transfer_s:.2g} s{beside}, a step {seen.step_s:.2g} s, and exchanges may take "
        f"{100 * budget:.3g} % of the time"
    )
    return max(steps, busy), why
