"""Seconds of something that is done again and again: warmed up, synchronised, the usual ones."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import mean

import torch

ROW_S = 0.04  # of what is short, done again and again
LONG_S = 0.2  # what takes a CPU that long is hardly slower because it is cold


@dataclass(frozen=True)
class Stopwatch:
    """Times work on one device.

    What is short is done several times in a row: a device that may use only a part of each moment (a CPU quota, a
    shared GPU) does little things at full speed, and only longer ones at its own.
    """

    device: torch.device
    enough_s: float  # spent on one reading, if `most` repetitions do not end it before
    least: int = 2
    most: int = 9
    row_s: float = ROW_S

    def read(self, act: Callable[[], object]) -> float:
        """Returns the seconds that `act` takes once it is warm."""
        return max(usual(self.readings(act)), 1e-9)

    def readings(self, act: Callable[[], object]) -> list[float]:
        """Returns the seconds that `act` takes, again and again once it is warm."""
        first = self.once(act)
        if self.device.type == "cpu" and first > max(LONG_S, self.enough_s):
            return [first]
        seconds = [first] if first > self.enough_s else []  # what takes that long is not slower because it is cold
        began = time.perf_counter()
        while len(seconds) < self.most:
            times = max(1, min(100, ceil(self.row_s / max(1e-6, first))))
            seconds.append(self.once(lambda times=times: [act() for _ in range(times)]) / times)  # type: ignore[misc]  # bound at once
            if len(seconds) >= self.least and time.perf_counter() - began > self.enough_s:
                break
        return seconds

    def once(self, act: Callable[[], object]) -> float:
        """Returns the seconds of one time."""
        finish(self.device)
        began = time.perf_counter()
        act()
        finish(self.device)
        return time.perf_counter() - began


def usual(readings: Sequence[float]) -> float:
    """Returns the mean of the middle half of the readings.

    A device with a CPU quota takes now one time, now another, for the same work, as its turns fall: the mean is what
    many steps take, the median would be one of the two. Without the outer quarters it does not see single accidents.

    >>> usual([2.0, 1.0, 2.0, 1.0, 9.0, 2.0, 1.0, 1.0])
    1.5
    """
    return mean(_middle(readings))


def apart(readings: Sequence[float]) -> float:
    """Returns how far the middle half of the readings lies apart, as a part of the usual one.

    >>> apart([1.0, 1.5, 2.5, 2.0, 9.0])
    0.5
    """
    middle = _middle(readings)
    return (middle[-1] - middle[0]) / mean(middle)


def _middle(readings: Sequence[float]) -> list[float]:
    ordered, outside = sorted(readings), len(readings) // 4
    return ordered[outside : len(ordered) - outside]


def finish(device: torch.device) -> None:
    """Returns when a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
