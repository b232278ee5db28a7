"""Chooses the length of the next period from the measurements of all ranks."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from evenly.schedule.step_counter import Schedule
from evenly.spec import Adaptive, Exchange
from evenly.spec.plan import counted

logger = logging.getLogger(__name__)

CHANGE = 2.0  # a period grows or shrinks at most by this factor where drift decides
STEPS_KEPT = 48
EXCHANGES_KEPT = 7
ENOUGH = 3  # steps without a pending exchange, for comparison


@dataclass(frozen=True)
class ExchangeCosts:
    """Measured by the slowest rank: seconds of a step and of a pending exchange, and the largest drift.

    The drift is that of the last exchange, and grew in `steps`. `slowed_s` is the time that an exchange adds to the
    steps it overlaps.
    """

    step_s: float = 0.0
    transfer_s: float = 0.0
    drift: float = 0.0
    steps: float = 0.0
    slowed_s: float = 0.0

    @property
    def row(self) -> tuple[float, ...]:
        """The numbers, for the vote."""
        return (self.step_s, self.transfer_s, self.drift, self.steps, self.slowed_s)


def choose(period: Adaptive, exchange: Exchange, now: int, costs: ExchangeCosts) -> tuple[int, str]:
    """Returns the steps of the next period and the reason; a period has `now` steps at present.

    >>> choose(Adaptive(exchange_budget=0.1), Exchange(), 4, ExchangeCosts(step_s=0.1, transfer_s=0.2))
    (18, 'an exchange takes 0.2 s, a step 0.1 s, and exchanges may take 10 % of the time')
    """
    if period.exchange_budget is not None:
        if not costs.step_s or not costs.transfer_s:
            return now, "nothing was measured yet"
        steps, why = _affordable(exchange, period.exchange_budget, costs)
    elif period.drift is None or not costs.drift:
        return now, "nodes have not gone apart"
    else:
        factor = min(CHANGE, max(1 / CHANGE, period.drift / costs.drift))
        steps = round(costs.steps * factor)
        why = (
            f"a node went {100 * costs.drift:.2g} % of the length of the parameters away from the average in "
            f"{counted(round(costs.steps), 'step')}, and may go {100 * period.drift:.3g} %"
        )
        if steps < exchange.least_adaptive_steps:
            why = f"{why}, but no period is shorter than twice the overlap"
    return min(max(exchange.least_adaptive_steps, steps), period.most), why


def _affordable(exchange: Exchange, budget: float, costs: ExchangeCosts) -> tuple[int, str]:
    measured = {"step_s": costs.step_s, "transfer_s": costs.transfer_s, "slowed_s": costs.slowed_s}
    steps = exchange.affordable_steps(**measured, budget=budget)
    overlapped = (
        f", beside {exchange.overlap} steps which it slows by {costs.slowed_s:.2g} s" if exchange.overlap else ""
    )
    why = (
        f"an exchange takes {costs.transfer_s:.2g} s{overlapped}, a step {costs.step_s:.2g} s, and exchanges may take "
        f"{100 * budget:.3g} % of the time"
    )
    return steps, why


class StepPace:
    """Measures the time of steps with and without a pending exchange, and of exchanges."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, bool]] = deque(maxlen=STEPS_KEPT)  # seconds; whether an exchange was pending
        self._transfers: list[float] = []
        self._slowed: list[float] = []
        self._extra_s: list[float] = []  # added to steps by exchanges since the last merge
        self._began: float | None = None
        self._during_exchange = False

    def begin(self, *, during_exchange: bool) -> None:
        """Starts the clock of the next step; `during_exchange`: an exchange is pending."""
        self._began, self._during_exchange = time.monotonic(), during_exchange

    def drop(self) -> None:
        """Discards the start of the next step: a checkpoint or an evaluation comes before it."""
        self._began = None

    def end(self) -> None:
        """Records the step just made."""
        if self._began is None:
            return
        seconds = time.monotonic() - self._began
        self._steps.append((seconds, self._during_exchange))
        if self._during_exchange and len(undisturbed := self._undisturbed()) >= ENOUGH:
            self._extra_s.append(seconds - median(undisturbed))

    def merged(self, transfer_s: float, *, slowed_s: float) -> tuple[float, float]:
        """Records an exchange; returns its time, and the time it adds to overlapped steps (default `slowed_s`).

        Both are medians: an occasional late exchange does not make periods longer.
        """
        self._transfers = [*self._transfers, transfer_s][-EXCHANGES_KEPT:]
        if self._extra_s:
            self._slowed, self._extra_s = [*self._slowed, sum(self._extra_s)][-EXCHANGES_KEPT:], []
        return median(self._transfers), max(0.0, median(self._slowed)) if self._slowed else slowed_s

    @property
    def median_s(self) -> float:
        """The seconds of a step, without a pending exchange if enough were measured; 0 before the first."""
        undisturbed = self._undisturbed()
        chosen = undisturbed if len(undisturbed) >= ENOUGH else [seconds for seconds, _ in self._steps]
        return median(chosen) if chosen else 0.0

    def _undisturbed(self) -> list[float]:
        return [seconds for seconds, during_exchange in self._steps if not during_exchange]


class PeriodChooser:
    """Measures the steps and exchanges of this rank, and sets the length of adaptive periods after an exchange.

    All ranks choose the same length, because they choose from the same measurements.
    """

    def __init__(self, schedule: Schedule, settings: Exchange, *, is_active: bool) -> None:
        self.on_period: list[Callable[[int, int, str], None]] = []  # called with step, steps of the next period, why
        self.pace = StepPace()
        self.costs = ExchangeCosts()  # that this rank measured in its last exchange
        self._schedule = schedule
        self._settings = settings
        self._is_active = is_active

    @property
    def measured(self) -> tuple[float, ...]:
        """The costs that this rank measured, as numbers for the vote."""
        return replace(self.costs, step_s=self.pace.median_s).row

    def update(self, *, begun: int, steps: int, seconds: float, drift: float, largest_costs: Sequence[float]) -> None:
        """Sets the length of the next period after an exchange that began after step `begun`, `steps` after another.

        This rank measured `seconds` and `drift`; `largest_costs` are those over all ranks before the exchange.
        """
        period, at = self._schedule.period, self._schedule
        if not isinstance(period, Adaptive) or not self._is_active or begun <= period.warmup:
            return
        transfer_s, slowed_s = self.pace.merged(seconds, slowed_s=self.costs.slowed_s)
        self.costs = ExchangeCosts(0.0, transfer_s, drift, steps, slowed_s)
        length, why = choose(period, self._settings, at.next_length, ExchangeCosts(*largest_costs))
        if length != at.next_length:
            at.next_length = length
            logger.info("after step %d: the next periods have %d steps: %s", at.step, length, why)
            for callback in self.on_period:
                callback(at.step, length, why)
