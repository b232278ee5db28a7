"""Training goes on while a checkpoint is written; it holds the state of its step, and errors reach all ranks."""

import json
import threading
import time

import pytest
import torch
from torch import nn

import evenly
from evenly.checkpoints import folder as folders
from evenly.checkpoints.manifest import read_manifest
from evenly.errors import CheckpointWriteError, SpecError
from evenly.spec import CheckpointFailed, CheckpointSaved, Run
from tests.processes import collect, run_processes, start_processes
from tests.ranks import ragged
from tests.session.programs import dataset, network

TRAIN = "tests.session.programs:train"


@pytest.fixture
def disk(monkeypatch):
    """A disk that waits until it may write, and counts who writes at the same time."""
    return Disk(monkeypatch)


class Disk:
    def __init__(self, monkeypatch) -> None:
        self.may_write = threading.Event()
        self.may_write.set()
        self.error: OSError | None = None
        self.writing = self.most_writing = self.parts = 0
        self._plain = folders.write_part
        monkeypatch.setattr(folders, "write_part", self._write)

    def _write(self, folder, part):
        self.writing += 1
        self.parts += 1
        self.most_writing = max(self.writing, self.most_writing)
        try:
            assert self.may_write.wait(30)
            if self.error is not None:
                raise self.error
            return self._plain(folder, part)
        finally:
            self.writing -= 1


def train(root, on_step, *, epochs=2, **settings):
    """Trains 7 steps an epoch and calls `on_step` with the session and the step after each."""
    with evenly.Session(root, device="cpu", progress=False, **settings) as session:
        torch.manual_seed(5)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        synchronized, _, loader = session.prepare(model, optimizer, dataset(), plan=session.plan(batch_size=8))
        for _ in session.epochs(epochs):
            for x, y in loader:
                nn.functional.cross_entropy(synchronized(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                on_step(session, synchronized.schedule.step)


def steps(root):
    return [folders.step_of(path) for path in folders.checkpoints(root / "checkpoints")]


def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_the_state_of_its_step(tmp_path, disk):
    seen = []

    def on_step(session, step):
        if step == 3:
            disk.may_write.clear()  # the checkpoint of step 4 waits
        if step == 7:
            seen.append(steps(tmp_path / "run"))
            disk.may_write.set()
        if step == 9:  # the checkpoint of step 8 has waited for that of step 4
            seen.append(steps(tmp_path / "run")[:1])

    train(tmp_path / "run", on_step, checkpoint_every=4, keep=9)
    assert seen == [[], [4]]
    train(tmp_path / "other", lambda *_: None, checkpoint_every=4, keep=9, checkpoint_async=False)
    for step in (4, 8, 12, 14):
        one, other = (read_manifest(tmp_path / name / "checkpoints" / f"step-{step:09d}") for name in ("run", "other"))
        assert one == other  # with the SHA-256 of all files
    events = Run.read(tmp_path / "run").of(CheckpointSaved)
    assert [event.step for event in events] == [4, 8, 12, 14]
    assert all(0 < event.held_s <= event.seconds for event in events)
    assert disk.most_writing == 1


def test_without_it_a_step_waits_for_the_disk(tmp_path, disk):
    seen = []
    train(tmp_path, lambda _, step: seen.append(steps(tmp_path)), checkpoint_every=4, checkpoint_async=False)
    assert seen[4] == [4]


def test_a_checkpoint_by_hand_is_complete_when_it_returns_its_folder(tmp_path):
    def on_step(session, step):
        if step == 3:
            path = session.checkpoint()
            assert read_manifest(path)["step"] == 3

    train(tmp_path, on_step, checkpoint_every=3)


def test_an_error_of_the_disk_ends_the_loop_a_step_later(tmp_path, disk):
    disk.error = OSError(28, "No space left on device")
    last = 0

    def on_step(session, step):
        nonlocal last
        last = step
        time.sleep(0.05)

    with pytest.raises(CheckpointWriteError, match="No space left") as told:
        train(tmp_path, on_step, checkpoint_every=3)
    assert 3 <= last <= 6
    assert "Rank 0 says" in str(told.value)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_an_error_at_the_end_of_the_run_is_raised_there(tmp_path, disk):
    def on_step(session, step):
        if step == 14:
            disk.error = OSError(30, "Read-only file system")

    with pytest.raises(CheckpointWriteError, match="Read-only"):
        train(tmp_path, on_step)
    assert steps(tmp_path) == [7]


def test_an_exception_of_the_program_waits_for_the_checkpoint_and_is_raised(tmp_path, disk):
    def on_step(session, step):
        if step == 5:
            disk.may_write.clear()
            threading.Timer(0.3, disk.may_write.set).start()
        if step == 7:
            assert steps(tmp_path) == []
            raise KeyError("a broken sample")

    disk.may_write.set()
    with pytest.raises(KeyError, match="a broken sample"):
        train(tmp_path, on_step, checkpoint_every=6)
    assert steps(tmp_path) == [6]
    assert [event.step for event in Run.read(tmp_path).of(CheckpointSaved)] == [6]


def test_a_value_that_is_logged_while_its_checkpoint_is_written_is_that_checkpoints(tmp_path, disk):
    with evenly.Session(tmp_path, device="cpu", progress=False, keep=1, keep_best="accuracy") as session:
        session.checkpoint()
        disk.may_write.clear()
        saving = session._saver  # as a loop saves: without waiting
        saving.save(0, ended_epochs=None, wait=False)
        session.log(accuracy=0.7)
        disk.may_write.set()
        saving.settle()
        assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["values"] == {"0": 0.7}


@pytest.mark.parametrize("rank", [0, 2])
def test_a_disk_that_is_full_on_one_rank_is_told_by_all(tmp_path, rank):
    arguments = {"folder": str(tmp_path / "run"), "full_disk_rank": rank, "pause_s": 0.02}
    ended = collect(start_processes(ragged(2, 1), TRAIN, arguments))
    for process in ended:
        assert process.code == 1
        assert "CheckpointWriteError" in process.errors.strip().splitlines()[-1], process.errors[-2000:]
        assert f"ranks [{rank}] could not write the checkpoint" in process.errors
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_all_ranks_go_on_without_a_checkpoint_of_a_disk_that_is_full_on_one(tmp_path):
    arguments = {"folder": str(tmp_path / "run"), "full_disk_rank": 1, "checkpoint_errors": "warn"}
    whole = run_processes(ragged(2, 1), TRAIN, {"folder": str(tmp_path / "whole")})
    assert run_processes(ragged(2, 1), TRAIN, arguments) == whole
    run = Run.read(tmp_path / "run")
    assert [event.step for event in run.of(CheckpointFailed)] == [3]
    assert [event.step for event in run.of(CheckpointSaved)] == [6, 9, 12, 15]


@pytest.mark.parametrize(
    "wish", [{"checkpoint_async": 1}, {"checkpoint_errors": "ignore"}, {"checkpoint_errors": None}]
)
def test_other_settings_are_refused(wish):
    with pytest.raises(SpecError, match=next(iter(wish))):
        evenly.Session(**wish)
