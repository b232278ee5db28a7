"""The record of a run -> its figures in a table of an experiment."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from evenly.errors import EvenlyError
from evenly.spec import EpochDone, ExchangeDone, Measured, Run, RunFinished, RunStarted, RunStopped


@dataclass(frozen=True)
class Outcome:
    """What came out of one run that is complete."""

    figures: Mapping[str, float]  # the last value of each
    epoch_s: float  # median over its epochs; 0: not known
    sent_bytes: int  # across nodes, in all steps
    curve: tuple[Mapping[str, float], ...] = ()  # the figures after each epoch
    torch: str = ""  # its version
    devices: tuple[str, ...] = ()  # of its ranks


def read_outcome(folder: Path) -> Outcome | None:
    """Returns the outcome of the run in `folder`, or None if it is not complete."""
    try:
        run = Run.read(folder)
    except (EvenlyError, OSError):
        return None
    if not _is_complete(run):
        return None
    figures = {name: value for name, value in run.latest_values().items() if value is not None and name != "epoch"}
    started = run.of(RunStarted)[-1]
    return Outcome(
        figures,
        _epoch_seconds(run),
        _sent_bytes(run),
        _curve(run),
        torch=str(started.settings.get("torch", "")),
        devices=tuple(device.name or device.kind for node in started.cluster.nodes for device in node.devices),
    )


def _is_complete(run: Run) -> bool:
    """Returns whether a run has made all its epochs; one that was stopped by a signal is recorded as finished, too."""
    complete = stopped = False
    for event in run.events:
        match event:
            case RunStarted():
                complete = stopped = False
            case RunStopped():
                stopped = True
            case RunFinished():
                complete = not stopped
    return complete


def _epoch_seconds(run: Run) -> float:
    """Returns the median time from the end of an epoch to the end of the next, without those that were interrupted."""
    seconds: list[float] = []
    before: float | None = None
    for event in run.events:
        if isinstance(event, RunStarted):
            before = None
        elif isinstance(event, EpochDone):
            if before is not None:
                seconds.append(event.at_s - before)
            before = event.at_s
    finished = run.last(RunFinished)
    epochs = len(run.of(EpochDone))
    return median(seconds) if seconds else (finished.seconds / epochs if finished is not None and epochs else 0.0)


def _sent_bytes(run: Run) -> int:
    """Returns the bytes that all ranks sent across nodes for the steps of the run, each counted once."""
    started = run.last(RunStarted)
    finished = [event for event in run.of(RunFinished) if event.steps]
    if started is None or not finished:
        return 0
    longest = max(finished, key=lambda event: event.steps)
    sent = _kept_exchanges(run) * sum(phases.exchange_bytes for phases in longest.phases) / max(longest.exchanges, 1)
    total_steps = started.settings.get("total_steps")
    if started.settings.get("every") == "global" and isinstance(total_steps, int):
        sent += total_steps * sum(phases.gradient_bytes for phases in longest.phases) / longest.steps
    return round(sent)


def _kept_exchanges(run: Run) -> int:
    """Returns the number of exchanges without those that a resumed run has made again."""
    steps: list[int] = []
    for event in run.events:
        if isinstance(event, RunStarted):
            steps = [step for step in steps if step <= event.resumed_step]
        elif isinstance(event, ExchangeDone):
            steps.append(event.step)
    return len(steps)


def _curve(run: Run) -> tuple[Mapping[str, float], ...]:
    """Returns the figures after each epoch; of one that was made twice those of the last time."""
    rows: dict[int, dict[str, float]] = {}
    epoch = 0
    for event in run.of(Measured):
        values = {name: value for name, value in event.values.items() if value is not None}
        epoch = int(values.get("epoch", epoch))
        rows.setdefault(epoch, {"epoch": epoch}).update(values)
    return tuple(rows[number] for number in sorted(rows))
