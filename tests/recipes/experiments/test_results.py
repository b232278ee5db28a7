"""What the record of a run says about it: complete or not, and its figures."""

from pathlib import Path

from evenly.recipes.experiments.results import read_outcome
from evenly.spec import (
    Event,
    ExchangeDone,
    Measured,
    RankExchange,
    RankStarted,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    StepTimes,
)
from tests.ranks import cluster_of, ragged

STARTED = RunStarted(at_s=1.0, name="x", cluster=cluster_of(ragged(1, 1)), settings={"torch": "2.13.0"})
MEASURED = Measured(at_s=2.0, step=5, values={"epoch": 1.0, "accuracy": 0.5})
STOPPED = RunStopped(at_s=3.0, epoch=0, step=5, reason="SIGTERM")
FINISHED = RunFinished(
    at_s=3.0,
    seconds=2.0,
    steps=5,
    samples=50,
    samples_per_s=25.0,
    exchanges=0,
    exchange_seconds=0.0,
    sent_bytes=0,
    interface_bytes=(0, 0),
)


def outcome_of(folder: Path, *events: Event):
    (folder / "run.jsonl").write_text("".join(event.model_dump_json() + "\n" for event in events))
    return read_outcome(folder)


def test_a_run_is_complete_once_its_last_start_has_finished(tmp_path):
    outcome = outcome_of(tmp_path, STARTED, MEASURED, FINISHED)
    assert outcome is not None
    assert outcome.figures == {"accuracy": 0.5}
    assert outcome.torch == "2.13.0"
    assert len(outcome.devices) == 2
    assert outcome_of(tmp_path, STARTED, MEASURED) is None
    assert outcome_of(tmp_path, STARTED, MEASURED, FINISHED, STARTED) is None
    assert outcome_of(tmp_path, STARTED, RunFailed(at_s=2.0, step=5, error="x")) is None


def test_a_run_that_was_stopped_by_a_signal_is_not_complete_before_it_has_gone_on(tmp_path):
    assert outcome_of(tmp_path, STARTED, MEASURED, STOPPED, FINISHED) is None
    assert outcome_of(tmp_path, STARTED, MEASURED, STOPPED, FINISHED, STARTED) is None
    assert outcome_of(tmp_path, STARTED, MEASURED, STOPPED, FINISHED, STARTED, FINISHED) is not None


def test_a_folder_without_a_record_is_not_complete(tmp_path):
    assert read_outcome(tmp_path) is None
    (tmp_path / "run.jsonl").write_text("no events\n")
    assert read_outcome(tmp_path) is None


def write_rank_logs(folder: Path, *, gradient_bytes: int, exchange_bytes: int) -> None:
    """Writes the logs of two ranks: five steps in two rows and two exchanges in one line each."""
    (folder / "ranks").mkdir()
    for rank in range(2):
        exchange = {"at_s": 0.5, "number": 2, "step": 4, "merged": 4, "seconds": 0.1, "met_s": 0.0, "waited_s": 0.1}
        lines = [
            RankStarted(at_s=1.0, rank=rank, node=rank).model_dump_json(),
            StepTimes(3, 3, 0.3, 0.3, 0.1, 0.1, 0.0, 0.0, 12.0, 3 * gradient_bytes).to_line(),
            StepTimes(5, 2, 0.5, 0.2, 0.1, 0.1, 0.0, 0.0, 8.0, 2 * gradient_bytes).to_line(),
            RankExchange(**exchange, sent_bytes=2 * exchange_bytes, count=2).model_dump_json(),
        ]
        (folder / "ranks" / f"{rank}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_bytes_of_a_run_that_was_killed_before_it_recorded_its_end_are_those_in_the_logs_of_its_ranks(tmp_path):
    write_rank_logs(tmp_path, gradient_bytes=10, exchange_bytes=100)
    nothing_left = FINISHED.model_copy(update={"steps": 0, "samples": 0})
    started = STARTED.model_copy(update={"settings": {"every": "global", "total_steps": 5}})
    again = started.model_copy(update={"resumed_step": 5})
    outcome = outcome_of(tmp_path, started, MEASURED, again, nothing_left)
    assert outcome is not None
    assert outcome.sent_bytes == 2 * 5 * 10

    exchanges = [
        ExchangeDone(
            at_s=1.5,
            number=n,
            step=2 * n,
            merged=2 * n,
            seconds=0.1,
            met_s=0.0,
            waited_s=0.1,
            sent_bytes=100,
            weights=(),
        )
        for n in (1, 2)
    ]
    again = STARTED.model_copy(update={"resumed_step": 5})
    outcome = outcome_of(tmp_path, STARTED, *exchanges, MEASURED, again, nothing_left)
    assert outcome is not None
    assert outcome.sent_bytes == 2 * 2 * 100
