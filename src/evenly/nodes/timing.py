"""How long this rank computes in a step, without the time in which it waits for others."""

import time

import torch

MOST = 64  # steps that are remembered


class StepClock:
    """Runs from the first forward of a step to the end of its own backward; on CUDA it reads the device's time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: float | torch.cuda.Event | None = None
        self._spans: list[tuple[float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def begin(self) -> None:
        """Starts, unless it runs already: a step may have several forwards."""
        if self._began is None:
            self._began = self._now()

    def end(self) -> None:
        """Notes a step."""
        if self._began is not None:
            self._spans = [*self._spans, (self._began, self._now())][-MOST:]
            self._began = None

    def take(self) -> list[float]:
        """Returns the seconds of the steps since the last call."""
        spans, self._spans = self._spans, []
        return [_between(*span) for span in spans]

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no annotation here
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(first: float | torch.cuda.Event, last: float | torch.cuda.Event) -> float:
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
    return float(last) - float(first)  # type: ignore[arg-type]  # both are numbers then
