"""The step counter that all ranks agree on, and the exchanges that are due."""

from collections.abc import Sequence
from typing import TypedDict

from evenly.spec import Adaptive, AnyPeriod, EveryEpoch, EveryGradient, EverySteps


class ScheduleProgress(TypedDict):
    """The counters of a `Schedule` in a checkpoint."""

    step: int
    since: list[int]  # steps since the last exchange of each fragment
    exchanges: int
    period: list[int]  # the step at which it began, its length, and that of the next one


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

    def due_at_epoch_end(self) -> bool:
        """Returns whether the end of an epoch calls for an exchange."""
        return self.since > 0 and isinstance(self.period, EveryEpoch | EveryGradient)

    def exchanged(self, fragments: Sequence[int]) -> None:
        """Records that an exchange of these fragments began."""
        self.exchanges += 1
        for fragment in fragments:
            self._since[fragment] = 0

    def progress(self) -> ScheduleProgress:
        """Returns the counters for a checkpoint."""
        lengths = [self._begun, self._length, self.next_length]
        return {"step": self.step, "since": list(self._since), "exchanges": self.exchanges, "period": lengths}

    def resume(self, progress: ScheduleProgress) -> None:
        """Restores the counters; a period other than the saved one starts anew."""
        self.step, self.exchanges = progress["step"], progress["exchanges"]
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
