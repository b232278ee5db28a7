"""Measures how long this rank computes in a step, without waiting for others."""

import time
from dataclasses import dataclass

import torch

from evenly.schedule.time_samples import TimeSamples

MOST = 64  # steps kept

Moment = float | torch.cuda.Event


@dataclass(frozen=True)
class Spent:
    """The seconds of a step, and those of it in which this rank computes."""

    computing_s: float
    whole_s: float


@dataclass
class _Step:
    spans: list[tuple[Moment, Moment]]  # computing times
    averaged: Moment | None = None  # when its gradients were averaged


class StepClock:
    """Runs from the first forward of a step to the end of this rank's backward; on CUDA it uses device events.

    It pauses while the rank waits for others inside the step, as the ranks of a cut network do in every layer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_wanted = False  # whether the times will be read
        self.computing_s = self.averaging_s = 0.0  # of all completed steps
        self.computing_times = TimeSamples()  # of completed steps
        self._step = 0
        self._runs = False
        self._began: Moment | None = None
        self._spans: list[tuple[Moment, Moment]] = []  # of the step that runs
        self._steps: list[_Step] = []  # since the last take()
        self._uncounted: list[_Step] = []

    def begin(self, step: int) -> None:
        """Starts, unless it runs already in this step, which may have several forwards."""
        if self.is_wanted and (not self._runs or step != self._step):
            self._step = step
            self._runs = True
            self._began = self._now()
            self._spans = []

    def pause(self) -> None:
        """Pauses the clock."""
        if self._runs and self._began is not None:
            self._spans.append((self._began, self._now()))
            self._began = None

    def resume(self) -> None:
        """Resumes the clock."""
        if self._runs and self._began is None:
            self._began = self._now()

    def end(self) -> None:
        """Records a step."""
        if self._runs:
            self.pause()
            step = _Step(self._spans)
            self._steps = [*self._steps, step][-MOST:]
            self._uncounted.append(step)
            self._runs = False

    def averaged(self) -> None:
        """Records that the gradients of the last step are averaged, and adds the times of completed steps."""
        if not self._uncounted:
            return
        self._uncounted[-1].averaged = self._now()
        while self._uncounted and _is_over(self._uncounted[0].averaged):
            step = self._uncounted.pop(0)
            computing_s = sum(_between(*span) for span in step.spans)
            self.computing_s += computing_s
            self.computing_times.add(computing_s)
            if step.averaged is not None and step.spans:
                self.averaging_s += _between(step.spans[-1][1], step.averaged)

    def take(self) -> list[Spent]:
        """Returns the times of the steps since the last call."""
        steps, self._steps = self._steps, []
        return [
            Spent(sum(_between(*span) for span in step.spans), _between(step.spans[0][0], step.spans[-1][1]))
            for step in steps
            if step.spans
        ]

    def _now(self) -> Moment:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _is_over(moment: Moment | None) -> bool:
    """Returns whether it has passed, without waiting for it; a skipped step was never averaged."""
    return bool(moment.query()) if isinstance(moment, torch.cuda.Event) else True


def _between(first: Moment, last: Moment) -> float:
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
    return float(last) - float(first)  # type: ignore[arg-type]  # both are numbers then
