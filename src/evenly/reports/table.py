"""Run -> the rows of a table: one per run, side by side."""

from dataclasses import dataclass
from pathlib import Path

from evenly.spec import EveryEpoch, EveryGradient, EverySteps, Run, RunFailed, RunFinished, RunStarted, StepsDone


@dataclass(frozen=True)
class Row:
    """What one run came to."""

    name: str
    cluster: str
    period: str
    state: str
    seconds: float | None
    samples_per_s: float | None
    mb_across: float | None
    exchanges: int | None
    accuracy: float | None


def row_of(run: Run, *, name: str = "") -> Row:
    """Returns the row of one run."""
    started, finished, failed = run.last(RunStarted), run.last(RunFinished), run.last(RunFailed)
    progress = run.last(StepsDone)
    where = f"step {progress.step}" if progress else "the start"
    complete = finished is not None and run.events[-1] == finished
    state = "done" if complete else f"failed: {failed.error}" if failed else f"stopped after {where}"
    accuracy = run.latest_values().get("accuracy")
    return Row(
        name=name or (started.name if started else "run"),
        cluster="+".join(str(len(node.ranks)) for node in started.cluster.nodes) if started else "?",
        period=_period(started),
        state=state,
        seconds=finished.seconds if finished else None,
        samples_per_s=finished.samples_per_s if finished else None,
        mb_across=sum(finished.interface_bytes) / 1e6 if finished else None,
        exchanges=finished.exchanges if finished else None,
        accuracy=accuracy,
    )


HEADERS = ("run", "ranks", "exchange", "state", "time s", "samples/s", "MB sent", "exchanges", "accuracy %")


def cells(row: Row) -> tuple[str, ...]:
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


def report(*runs: Run | str | Path) -> str:
    """Returns a plain table of runs, given as values, run folders or `run.jsonl` files."""
    rows = [HEADERS, *(cells(_row(run)) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADERS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(run: Run | str | Path) -> Row:
    return row_of(run) if isinstance(run, Run) else row_of(Run.read(run), name=Path(run).name.removesuffix(".jsonl"))


def _period(started: RunStarted | None) -> str:
    match started.plan.period if started and started.plan else None:
        case EveryGradient():
            return "global"
        case EverySteps(steps=steps):
            return f"every {steps} steps"
        case EveryEpoch():
            return "every epoch"
    return "?"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
