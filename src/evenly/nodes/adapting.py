"""How long the next period should be, from what all ranks have measured."""

import time
from dataclasses import dataclass
from statistics import median

from evenly.spec import Adaptive, Exchange

CHANGE = 2.0  # a period grows or shrinks at most by this factor where drift decides
STEPS_KEPT = 32
EXCHANGES_KEPT = 7


@dataclass(frozen=True)
class Seen:
    """What the slowest of all ranks saw: seconds of a step and of an exchange under way, and the largest drift.

    The drift is that of the last exchange, and grew in `steps`. `slowed_s` is what an exchange adds to the steps beside
    it.
    """

    step_s: float = 0.0
    transfer_s: float = 0.0
    drift: float = 0.0
    steps: float = 0.0
    slowed_s: float = 0.0

    @property
    def row(self) -> tuple[float, ...]:
        """The numbers, to be told."""
        return (self.step_s, self.transfer_s, self.drift, self.steps, self.slowed_s)


def choose(period: Adaptive, exchange: Exchange, now: int, seen: Seen) -> tuple[int, str]:
    """Returns the steps of the next period, of which one has `now`, and why.

    >>> choose(Adaptive(exchange_budget=0.1), Exchange(), 4, Seen(step_s=0.1, transfer_s=0.2))
    (18, 'an exchange takes 0.2 s, a step 0.1 s, and exchanges may take 10 % of the time')
    """
    if period.exchange_budget is not None:
        if not seen.step_s or not seen.transfer_s:
            return now, "nothing was measured yet"
        steps, why = _affordable(exchange, period.exchange_budget, seen)
    elif period.drift is None or not seen.drift:
        return now, "nodes have not gone apart"
    else:
        factor = min(CHANGE, max(1 / CHANGE, period.drift / seen.drift))
        steps = round(seen.steps * factor)
        why = (
            f"a node went {100 * seen.drift:.2g} % of the length of the parameters away from the average in "
            f"{seen.steps:.0f} steps, and may go {100 * period.drift:.3g} %"
        )
    return min(max(exchange.calm_steps, steps), period.most), why


def _affordable(exchange: Exchange, budget: float, seen: Seen) -> tuple[int, str]:
    measured = {"step_s": seen.step_s, "transfer_s": seen.transfer_s, "slowed_s": seen.slowed_s}
    steps = exchange.affordable_steps(**measured, budget=budget)
    beside = f", beside {exchange.overlap} steps which it slows by {seen.slowed_s:.2g} s" if exchange.overlap else ""
    why = (
        f"an exchange takes {seen.transfer_s:.2g} s{beside}, a step {seen.step_s:.2g} s, and exchanges may take "
        f"{100 * budget:.3g} % of the time"
    )
    return steps, why


class Pace:
    """How long steps take beside no exchange, how much longer beside one, and how long exchanges take."""

    def __init__(self) -> None:
        self._free: list[float] = []  # seconds of steps beside no exchange
        self._transfers: list[float] = []
        self._slowed: list[float] = []
        self._more_s = 0.0  # that steps have needed beside exchanges, since the last was merged
        self._began: float | None = None
        self._beside = False

    def begin(self, *, beside: bool) -> None:
        """Starts the clock of the next step, which is made `beside` an exchange or not."""
        self._began, self._beside = time.monotonic(), beside

    def end(self) -> None:
        """Notes the step just made."""
        if self._began is None:
            return
        seconds = time.monotonic() - self._began
        if not self._beside:
            self._free = [*self._free, seconds][-STEPS_KEPT:]
        elif self._free:
            self._more_s += seconds - self.median_s

    def merged(self, transfer_s: float) -> tuple[float, float]:
        """Notes an exchange; returns what one takes, and what it adds to the steps beside it.

        Both are medians: a late exchange now and then is no reason for longer periods.
        """
        self._transfers = [*self._transfers, transfer_s][-EXCHANGES_KEPT:]
        self._slowed, self._more_s = [*self._slowed, self._more_s][-EXCHANGES_KEPT:], 0.0
        return median(self._transfers), max(0.0, median(self._slowed))

    @property
    def median_s(self) -> float:
        """The seconds of a step beside no exchange; 0: none was made."""
        return median(self._free) if self._free else 0.0
