"""Event -> the step it belongs to, and numbers with names."""

import math

from evenly.spec import (
    CheckpointFailed,
    CheckpointSaved,
    EpochDone,
    Event,
    ExchangeDone,
    Measured,
    PeriodChosen,
    Rebalanced,
    RunFailed,
    RunFinished,
    RunStarted,
    StepsDone,
    Straggler,
)

PREFIX = "evenly/"  # of all names but those that the program logged


class EventValues:
    """The numbers in the events of one run; a rate is that since the event before."""

    def __init__(self) -> None:
        self._step = 0
        self._progress: tuple[float, float] | None = None  # time and samples of all ranks at the last progress

    def __call__(self, event: Event) -> tuple[int, dict[str, float]]:
        """Returns the step of an event and its numbers; what was not finite is NaN."""
        self._step = max(self._step, _step_of(event))
        if isinstance(event, Measured):
            values = {name: math.nan if value is None else float(value) for name, value in event.values.items()}
            return event.step, values
        numbers = self._numbers(event)
        return _step_of(event) or self._step, {f"{PREFIX}{name}": float(number) for name, number in numbers.items()}

    def _numbers(self, event: Event) -> dict[str, float]:
        match event:
            case RunStarted(at_s=at_s, cluster=cluster):
                self._progress = at_s, 0.0
                return {"ranks": cluster.world_size, "failed": 0}
            case StepsDone(epoch=epoch, samples=samples):
                return {"epoch": epoch, "samples": samples, **self._rate(event)}
            case ExchangeDone():
                return {
                    "exchange/seconds": event.seconds,
                    "exchange/waited_s": event.waited_s,
                    "exchange/sent_bytes": event.sent_bytes,
                    "exchange/drift": event.drift,
                    "exchange/number": event.number,
                }
            case PeriodChosen(steps=steps):
                return {"period_steps": steps}
            case Rebalanced(samples=samples):
                return {f"batch_samples/{index}": count for index, count in enumerate(samples)}
            case EpochDone(epoch=epoch):
                return {"epoch": epoch}
            case CheckpointSaved(seconds=seconds):
                return {"checkpoint/seconds": seconds, "checkpoint/failed": 0}
            case CheckpointFailed():
                return {"checkpoint/failed": 1}
            case Straggler(rank=rank, factor=factor, is_over=is_over):
                return {f"straggler/{rank}": 1.0 if is_over else factor}
            case RunFailed():
                return {"failed": 1}
            case RunFinished():
                return {
                    "run/seconds": event.seconds,
                    "run/samples_per_s": event.samples_per_s,
                    "run/exchange_seconds": event.exchange_seconds,
                    "run/sent_bytes": event.sent_bytes,
                }
        return {}

    def _rate(self, event: StepsDone) -> dict[str, float]:
        before, self._progress = self._progress, (event.at_s, event.samples)
        if before is None or event.at_s <= before[0]:
            return {}
        return {"samples_per_s": (event.samples - before[1]) / (event.at_s - before[0])}


def _step_of(event: Event) -> int:
    """Returns the step of an event; 0 for one that has none."""
    match event:
        case RunStarted(resumed_step=step):
            return step
        case ExchangeDone(step=step, merged=merged):
            return max(step, merged)
        case RunFinished():
            return 0
    return event.step
