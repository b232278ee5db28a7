"""The step counter that all ranks agree on, and the exchanges that are due."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from evenly.spec import Adaptive, AnyPeriod, EveryEpoch, EveryGradient, EverySteps


class ScheduleProgress(TypedDict):
    """The counters of a `Schedule` in a checkpoint."""

    step: int
    since: list[int]  # steps since the last exchange of each fragment
    exchanges: int
    period: list[int]  # the step at which it began, its length, and that of the next one
    epochs: NotRequired[list[int]]  # epochs that have ended, and the step at which the last one did


class Schedule:
    """Counts steps from 1; skipped steps count, so that no node can shift the schedule of the others.

    Of F fragments the f-th, counted from 1, is due after ceil(K' f / F) steps of a period of K'. A new length of the
    period holds from the next one on.
    """

    def __init__(self, period: AnyPeriod, fragments: int = 1, *, least: int = 1) -> None:
        self.period, self.fragments = period, fragments
        self.step = self.exchanges = 0
        self.next_length = _length(period, least)
        self._begun, self._length = 0 if isinstance(period, EveryGradient) else period.warmup, self.next_length
        self._since = [0] * fragments  # steps since the last exchange of each fragment
        self._epochs = self._epoch_end = 0  # epochs that have ended, and the step at which the last one did

    def stop_counting(self) -> None:
        """From now on no number of steps makes an exchange due: somebody else begins them."""
        self._length = self.next_length = 0

    @property
    def since(self) -> int:
        """Steps since the oldest of the fragments' last exchanges."""
        return max(self._since)

    @property
    def warms_up(self) -> bool:
        """Whether the step just made was one of the first, each of which is followed by an exchange."""
        return not isinstance(self.period, EveryGradient) and self.step <= self.period.warmup

    def since_of(self, fragments: Sequence[int]) -> int:
        """Returns the steps since the oldest of these fragments' last exchanges."""
        return max(self._since[fragment] for fragment in fragments)

    def advance(self, *, is_expired: bool = False) -> list[int]:
        """Counts one step; returns the fragments that are due after it. `is_expired` ends periods in seconds."""
        if self.step == self._begun:
            self._length = self.next_length
        self.step += 1
        self._since = [since + 1 for since in self._since]
        if self.warms_up or is_expired:
            return list(range(self.fragments))
        if not self._length:
            return []
        steps, length = self.step - self._begun, self._length
        if steps == length:
            self._begun = self.step
        return [f for f in range(self.fragments) if steps == -(-length * (f + 1) // self.fragments)]

    def due_at_epoch_end(self, epochs: int | None = None) -> bool:
        """Returns whether the end of an epoch calls for an exchange.

        `epochs` is the number of epochs that have ended. If left out, calls are counted; a second one after the same
        step is that of the same epoch.
        """
        if epochs is not None:
            self._epochs = epochs
        elif self.step > self._epoch_end:
            self._epochs += 1
        self._epoch_end = self.step
        is_over = isinstance(self.period, EveryEpoch) and self._epochs % self.period.epochs == 0
        return self.since > 0 and (is_over or isinstance(self.period, EveryGradient))

    def record_begun(self, fragments: Sequence[int]) -> None:
        """Records that an exchange of these fragments began."""
        self.exchanges += 1
        for fragment in fragments:
            self._since[fragment] = 0

    def record_postponed(self, fragments: Sequence[int], steps: int) -> None:
        """Records that an exchange that began `steps` steps after the one before was not made."""
        self.exchanges -= 1
        for fragment in fragments:
            self._since[fragment] += steps

    def progress(self) -> ScheduleProgress:
        """Returns the counters for a checkpoint."""
        lengths = [self._begun, self._length, self.next_length]
        return {
            "step": self.step,
            "since": list(self._since),
            "exchanges": self.exchanges,
            "period": lengths,
            "epochs": [self._epochs, self._epoch_end],
        }

    def resume(self, progress: ScheduleProgress) -> None:
        """Restores the counters; a period other than the saved one starts anew."""
        self.step, self.exchanges = progress["step"], progress["exchanges"]
        self._epochs, self._epoch_end = progress.get("epochs", (0, 0))
        saved = list(progress["since"])
        self._since = saved if len(saved) == self.fragments else [max(saved)] * self.fragments
        begun, length, following = progress["period"]
        if length == self._length or (length and isinstance(self.period, Adaptive)):
            self._begun = begun
            self._length = length
            self.next_length = following
        else:
            self._begun = max(self._begun, self.step)


def _length(period: AnyPeriod, least: int) -> int:
    """Returns the steps of the first period; 0 where it is not counted in steps."""
    match period:
        case EverySteps(steps=steps):
            return steps
        case Adaptive(start=steps, most=most):
            return min(max(steps, least), most)
    return 0
