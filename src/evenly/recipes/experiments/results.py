"""The record of a run -> its figures in a table of an experiment."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

from evenly.errors import EvenlyError
from evenly.spec import EpochDone, ExchangeDone, Measured, Run, RunFinished, RunStarted, RunStopped, read_rank_logs


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
        _sent_bytes(run, folder),
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


def _sent_bytes(run: Run, folder: Path) -> int:
    """Returns the bytes that all ranks sent across nodes for the steps of the run, each counted once."""
    started = run.last(RunStarted)
    if started is None:
        return 0
    of_exchange, of_step = _bytes_in_totals(run) or _bytes_in_rank_logs(folder)
    sent = _kept_exchanges(run) * of_exchange
    total_steps = started.settings.get("total_steps")
    if started.settings.get("every") == "global" and isinstance(total_steps, int):
        sent += total_steps * of_step
    return round(sent)


def _bytes_in_totals(run: Run) -> tuple[float, float] | None:
    """Returns the bytes of an exchange and of the gradients of a step, by the totals of the longest start of the run.

    None: no start that made steps has ended by itself.
    """
    finished = [event for event in run.of(RunFinished) if event.steps]
    if not finished:
        return None
    longest = max(finished, key=lambda event: event.steps)
    return (
        sum(phases.exchange_bytes for phases in longest.phases) / max(longest.exchanges, 1),
        sum(phases.gradient_bytes for phases in longest.phases) / longest.steps,
    )


def _bytes_in_rank_logs(folder: Path) -> tuple[float, float]:
    """Returns the same by what the ranks recorded: of a run that was killed between its last step and its end."""
    of_exchange = of_step = 0.0
    for _, parts in groupby(read_rank_logs(folder).parts, key=lambda part: part.started.rank):
        of_rank = list(parts)
        exchanges = [exchange for part in of_rank for exchange in part.exchanges]
        steps = [step for part in of_rank for step in part.steps]
        of_exchange += sum(one.sent_bytes for one in exchanges) / max(sum(one.count for one in exchanges), 1)
        of_step += sum(one.gradient_bytes for one in steps) / max(sum(one.steps for one in steps), 1)
    return of_exchange, of_step


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
