"""What the record of a run says about it: complete or not, and its figures."""

from pathlib import Path

from evenly.recipes.experiments.results import read_outcome
from evenly.spec import Event, Measured, RunFailed, RunFinished, RunStarted, RunStopped
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
