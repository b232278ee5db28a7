"""Seconds of repeated work: warmed up, synchronized, without outliers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import mean

import torch

ROW_S = 0.04  # short work is repeated for this long
LONG_S = 0.2  # on a CPU, warm-up hardly matters for work this long


@dataclass(frozen=True)
class Stopwatch:
    """Times work on one device.

    Short work is repeated in a row: a device with a CPU quota, or a shared GPU, does short work at full speed and
    shows its real speed only over a longer time.
    """

    device: torch.device
    enough_s: float  # spent on one measurement, unless `most` readings end it before
    least: int = 2
    most: int = 9
    row_s: float = ROW_S

    def read(self, work: Callable[[], object]) -> float:
        """Returns the seconds that `work` takes once it is warm."""
        return max(interquartile_mean(self.readings(work)), 1e-9)

    def readings(self, work: Callable[[], object]) -> list[float]:
        """Returns repeated readings of the seconds that `work` takes once it is warm."""
        first_s = self.once(work)
        if self.device.type == "cpu" and first_s > max(LONG_S, self.enough_s):
            return [first_s]
        seconds = [first_s] if first_s > self.enough_s else []  # warm-up does not matter for work this long
        began = time.perf_counter()
        while len(seconds) < self.most:
            repeats = max(1, min(100, ceil(self.row_s / max(1e-6, first_s))))
            seconds.append(self.once(lambda repeats=repeats: [work() for _ in range(repeats)]) / repeats)  # type: ignore[misc]  # bound at once
            if len(seconds) >= self.least and time.perf_counter() - began > self.enough_s:
                break
        return seconds

    def once(self, work: Callable[[], object]) -> float:
        """Returns the seconds of one call."""
        synchronize_device(self.device)
        began = time.perf_counter()
        work()
        synchronize_device(self.device)
        return time.perf_counter() - began


def interquartile_mean(readings: Sequence[float]) -> float:
    """Returns the mean of the middle half of the readings.

    A device with a CPU quota alternates between two times for the same work: the mean is what many steps take, the
    median would be one of the two. Leaving out the outer quarters removes single outliers.

    >>> interquartile_mean([2.0, 1.0, 2.0, 1.0, 9.0, 2.0, 1.0, 1.0])
    1.5
    """
    return mean(_middle(readings))


def relative_spread(readings: Sequence[float]) -> float:
    """Returns the range of the middle half of the readings, relative to their mean.

    >>> relative_spread([1.0, 1.5, 2.5, 2.0, 9.0])
    0.5
    """
    middle = _middle(readings)
    return (middle[-1] - middle[0]) / mean(middle)


def _middle(readings: Sequence[float]) -> list[float]:
    ordered, outside = sorted(readings), len(readings) // 4
    return ordered[outside : len(ordered) - outside]


def synchronize_device(device: torch.device) -> None:
    """Returns when a device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
