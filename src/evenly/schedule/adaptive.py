"""How long the next period should be, from what all ranks have measured."""

import time
from dataclasses import dataclass
from statistics import median

from evenly.spec import Adaptive, Exchange

CHANGE = 2.0  # a period grows or shrinks at most by this factor where drift decides
STEPS_KEPT = 48
EXCHANGES_KEPT = 7
ENOUGH = 3  # steps beside no exchange, to compare others with


@dataclass(frozen=True)
class ExchangeCosts:
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


def choose(period: Adaptive, exchange: Exchange, now: int, seen: ExchangeCosts) -> tuple[int, str]:
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
        if steps < exchange.calm_steps:
            why = f"{why}, but no period is shorter than twice the overlap"
    return min(max(exchange.calm_steps, steps), period.most), why


def _affordable(exchange: Exchange, budget: float, seen: ExchangeCosts) -> tuple[int, str]:
    measured = {"step_s": seen.step_s, "transfer_s": seen.transfer_s, "slowed_s": seen.slowed_s}
    steps = exchange.affordable_steps(**measured, budget=budget)
    beside = f", beside {exchange.overlap} steps which it slows by {seen.slowed_s:.2g} s" if exchange.overlap else ""
    why = (
        f"an exchange takes {seen.transfer_s:.2g} s{beside}, a step {seen.step_s:.2g} s, and exchanges may take "
        f"{100 * budget:.3g} % of the time"
    )
    return steps, why


class StepPace:
    """How long steps take beside no exchange, how much longer beside one, and how long exchanges take."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, bool]] = []  # seconds, and whether beside an exchange
        self._transfers: list[float] = []
        self._slowed: list[float] = []
        self._more: list[float] = []  # that steps have needed beside exchanges, since the last was merged
        self._began: float | None = None
        self._beside = False

    def begin(self, *, beside: bool) -> None:
        """Starts the clock of the next step, which is made `beside` an exchange or not."""
        self._began, self._beside = time.monotonic(), beside

    def drop(self) -> None:
        """Forgets when the next step began: a checkpoint or an evaluation comes before it."""
        self._began = None

    def end(self) -> None:
        """Notes the step just made."""
        if self._began is None:
            return
        seconds = time.monotonic() - self._began
        self._steps = [*self._steps, (seconds, self._beside)][-STEPS_KEPT:]
        if self._beside and len(free := self._free()) >= ENOUGH:
            self._more.append(seconds - median(free))

    def merged(self, transfer_s: float, *, slowed_s: float) -> tuple[float, float]:
        """Notes an exchange; returns what one takes, and what it adds to the steps beside it (else `slowed_s`).

        Both are medians: a late exchange now and then is no reason for longer periods.
        """
        self._transfers = [*self._transfers, transfer_s][-EXCHANGES_KEPT:]
        if self._more:
            self._slowed, self._more = [*self._slowed, sum(self._more)][-EXCHANGES_KEPT:], []
        return median(self._transfers), max(0.0, median(self._slowed)) if self._slowed else slowed_s

    @property
    def median_s(self) -> float:
        """The seconds of a step, beside no exchange if some were made so; 0: none was made."""
        free = self._free()
        chosen = free if len(free) >= ENOUGH else [seconds for seconds, _ in self._steps]
        return median(chosen) if chosen else 0.0

    def _free(self) -> list[float]:
        return [seconds for seconds, beside in self._steps if not beside]
