"""Seconds of something that is done again and again: warmed up, synchronised, the median."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Reading:
    """Repeated times: their median, and how far they lie apart compared with it."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Stopwatch:
    """Times work on one device; `enough_s` is spent on one reading, if `most` repetitions do not end it before."""

    device: torch.device
    enough_s: float
    least: int = 2
    most: int = 15

    def read(self, act: Callable[[], object]) -> Reading:
        """Returns the time that `act` takes once it is warm."""
        first = self.once(act)
        seconds = [] if first < self.enough_s else [first]  # what takes that long is not slower because it is cold
        began = time.perf_counter()
        while len(seconds) < self.most:
            seconds.append(self.once(act))
            if len(seconds) >= self.least and time.perf_counter() - began > self.enough_s:
                break
        middle = max(median(seconds), 1e-9)
        return Reading(middle, (max(seconds) - min(seconds)) / middle)

    def once(self, act: Callable[[], object]) -> float:
        """Returns the seconds of one time."""
        self._synchronize()
        began = time.perf_counter()
        act()
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
