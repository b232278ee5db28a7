"""Runs as a training program would have recorded them."""

from pathlib import Path
from typing import Any

from evenly.spec import (
    CheckpointSaved,
    EpochDone,
    EverySteps,
    Measured,
    Plan,
    RunFailed,
    RunFinished,
    RunStarted,
    StepsDone,
    period_of,
)
from tests.ranks import cluster_of, ragged


def started(*, every: Any = 50, resumed: int = 0, name: str = "first") -> RunStarted:
    """Returns the start of a run on nodes of three ranks and one."""
    cluster = cluster_of(ragged(3, 1))
    plan = Plan.even(cluster, batch_size=8, period=period_of(every))
    return RunStarted(at_s=100.0, name=name, cluster=cluster, plan=plan, resumed_step=resumed)


def steps(step: int) -> StepsDone:
    return StepsDone(at_s=101.0, epoch=0, step=step, samples=32 * step)


def measured(**values: float | None) -> Measured:
    return Measured(at_s=102.0, step=20, values=values)


def epoch(step: int) -> EpochDone:
    return EpochDone(at_s=102.5, epoch=1, step=step)


def checkpoint(step: int) -> CheckpointSaved:
    return CheckpointSaved(at_s=102.6, step=step, path="somewhere", seconds=0.1)


def failed(text: str = "PeerError: rank 3 on far stopped: DataError: no data") -> RunFailed:
    return RunFailed(at_s=103.0, step=20, error=text)


def finished(seconds: float = 10.0, samples: int = 6400, exchanges: int = 4) -> RunFinished:
    return RunFinished(
        at_s=110.0,
        seconds=seconds,
        steps=200,
        samples=samples,
        samples_per_s=samples / seconds,
        exchanges=exchanges,
        exchange_seconds=0.5,
        sent_bytes=123,
        interface_bytes=(200 * samples, 50 * samples),
    )


def write(folder: Path, *events: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.jsonl").write_text("".join(event.model_dump_json() + "\n" for event in events))
    return folder


WARM = EverySteps(8, warmup=2)
