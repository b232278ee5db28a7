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

    The drift is that of the last exchange, and grew in `steps`.
    """

    step_s: float = 0.0
    transfer_s: float = 0.0
    drift: float = 0.0
    steps: float = 0.0

    @property
    def row(self) -> tuple[float, ...]:
        """The four numbers, to be told."""
        return (self.step_s, self.transfer_s, self.drift, self.steps)


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
    return min(max(exchange.least_steps, steps), period.most), why


def _affordable(exchange: Exchange, budget: float, seen: Seen) -> tuple[int, str]:
    steps = exchange.affordable_steps(step_s=seen.step_s, transfer_s=seen.transfer_s, budget=budget)
    beside = f", beside {exchange.overlap} steps" if exchange.overlap else ""
    why = (
        f"an exchange takes {seen.transfer_s:.2g} s{beside}, a step {seen.step_s:.2g} s, and exchanges may take "
        f"{100 * budget:.3g} % of the time"
    )
    return steps, why


class Pace:
    """How long steps take, without exchanges, and how long exchanges."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._transfers: list[float] = []
        self._began: float | None = None

    def begin(self) -> None:
        """Starts the clock of the next step."""
        self._began = time.monotonic()

    def end(self) -> None:
        """Notes the step just made."""
        if self._began is not None:
            self._seconds = [*self._seconds, time.monotonic() - self._began][-STEPS_KEPT:]

    def transferred(self, seconds: float) -> float:
        """Notes an exchange and returns what one takes: a late one now and then is no reason for longer periods."""
        self._transfers = [*self._transfers, seconds][-EXCHANGES_KEPT:]
        return median(self._transfers)

    @property
    def median_s(self) -> float:
        """The seconds of a step; 0: none was made."""
        return median(self._seconds) if self._seconds else 0.0
