"""Run -> the rows of a table: one per run, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from evenly.reports.fresh_start import since_fresh_start
from evenly.reports.phases import PHASE_HEADERS, phase_rows, remarks
from evenly.reports.predictions import PREDICTION_HEADERS, prediction_rows
from evenly.spec import (
    Adaptive,
    Event,
    EveryEpoch,
    EveryGradient,
    EverySeconds,
    EverySteps,
    Run,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
)


@dataclass(frozen=True)
class TableRow:
    """The results of one run; a resumed run is the sum of its parts that finished."""

    name: str
    cluster: str
    period: str
    state: Literal["done", "failed", "unfinished", "stopped early"]
    note: str  # of an unfinished run: the error, or its last step
    seconds: float | None
    samples_per_s: float | None
    mb_across: float | None
    exchanges: int | None
    accuracy: float | None


def row_of(run: Run, *, name: str = "") -> TableRow:
    """Returns the row of one run."""
    whole = since_fresh_start(run)
    started, parts = whole.last(RunStarted), whole.of(RunFinished)
    seconds = sum(part.seconds for part in parts)
    state, note = _state(whole)
    return TableRow(
        name=name or (started.name if started else "run"),
        cluster="+".join(str(len(node.ranks)) for node in started.cluster.nodes) if started else "?",
        period=_period(started),
        state=state,
        note=note,
        seconds=seconds if parts else None,
        samples_per_s=sum(part.samples for part in parts) / seconds if seconds else None,
        mb_across=sum(sum(part.interface_bytes) for part in parts) / 1e6 if parts else None,
        exchanges=sum(part.exchanges for part in parts) if parts else None,
        accuracy=whole.latest_values().get("accuracy"),
    )


HEADERS = ("run", "ranks", "period", "state", "time s", "samples/s", "MB", "exch.", "acc. %")


def cells(row: TableRow) -> tuple[str, ...]:
    """Returns a row as texts, under `HEADERS`."""
    return (
        row.name,
        row.cluster,
        row.period,
        row.state,
        _number(row.seconds, ".1f"),
        _number(row.samples_per_s, ".0f"),
        _number(row.mb_across, ".1f"),
        _number(row.exchanges, "d"),
        _number(None if row.accuracy is None else 100 * row.accuracy, ".2f"),
    )


def notes(rows: Sequence[TableRow]) -> list[str]:
    """Returns a line for each unfinished run: why it stopped."""
    return [f"{row.name} {row.state}{':' if row.state == 'failed' else ''} {row.note}" for row in rows if row.note]


def read_row(path: str | Path) -> TableRow:
    """Returns the row of a run folder or `run.jsonl` file, named after the folder."""
    file = Path(path)
    return row_of(Run.read(file), name=file.parent.name if file.suffix == ".jsonl" else file.name)


def report(*runs: Run | str | Path) -> str:
    """Returns a plain table of runs, given as values, run folders or `run.jsonl` files.

    For a single run it also shows where the time of each rank went, and what its plan predicted.
    """
    rows = [row_of(run) if isinstance(run, Run) else read_row(run) for run in runs]
    lines = [*_table([HEADERS, *map(cells, rows)]), *notes(rows)]
    if len(runs) == 1:
        run = runs[0] if isinstance(runs[0], Run) else Run.read(runs[0])
        phases = phase_rows(run)
        lines += ["", *_table([PHASE_HEADERS, *phases])] if phases else []
        predictions = prediction_rows(run)
        lines += ["", *_table([PREDICTION_HEADERS, *predictions])] if predictions else []
        lines += remarks(run)
    return "\n".join(lines)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _state(whole: Run) -> tuple[Literal["done", "failed", "unfinished", "stopped early"], str]:
    latest = list(takewhile(lambda event: not isinstance(event, RunStarted), reversed(whole.events)))
    for event in latest:
        if isinstance(event, RunStopped):
            return "stopped early", f"after step {event.step}, in epoch {event.epoch}: {event.reason}"
    for event in latest:
        if isinstance(event, RunFinished):
            return "done", ""
        if isinstance(event, RunFailed):
            return "failed", event.error
    step = max((_step(event) for event in whole.events), default=0)
    return "unfinished", f"after step {step}" if step else "before its first recorded step"


def _step(event: Event) -> int:
    return event.resumed_step if isinstance(event, RunStarted) else int(getattr(event, "step", 0))


def _period(started: RunStarted | None) -> str:
    match started.plan.period if started and started.plan else None:
        case EveryGradient():
            return "global"
        case EverySteps(steps=steps):
            return str(steps)
        case EverySeconds(seconds=seconds):
            return f"{seconds:g} s"
        case EveryEpoch(epochs=epochs):
            return "epoch" if epochs == 1 else f"{epochs} epochs"
        case Adaptive():
            return "adaptive"
    return "?"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
