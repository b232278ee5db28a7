"""Samples and seconds of the last periods -> samples per second."""

from collections.abc import Callable
from typing import final

KEPT = 0.5  # of what earlier periods count, with each that follows


@final
class TrainedRate:
    """The samples per second that a node trains; a period counts as much as it has samples, and earlier ones less."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at_s: float | None = None
        self._period_samples = 0
        self._samples = self._seconds = 0.0

    @property
    def samples_per_s(self) -> float:
        """The rate; 0 if nothing was trained yet."""
        return self._samples / self._seconds if self._seconds > 0 else 0.0

    def begin(self) -> None:
        """Begins a period, unless one is under way."""
        if self._began_at_s is None:
            self._began_at_s = self._clock()

    def count(self, samples: int) -> None:
        """Counts samples of the period."""
        self._period_samples += samples

    def end(self) -> None:
        """Ends a period; what follows until the next one is not training."""
        if self._began_at_s is None:
            return
        self._samples = KEPT * self._samples + self._period_samples
        self._seconds = KEPT * self._seconds + self._clock() - self._began_at_s
        self._began_at_s, self._period_samples = None, 0
