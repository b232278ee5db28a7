"""A full disk, or a folder that may not be written: a typed error on all ranks, or a run that goes on without."""

import errno
import logging
import os
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from evenly import Session
from evenly.checkpoints import folder
from evenly.errors import CheckpointDamageError, CheckpointError, CheckpointWriteError
from evenly.spec import CheckpointFailed, CheckpointSaved, Run, RunFailed, RunFinished
from tests.checkpoints.saving_programs import Grown, opened, resume, save, save_steps
from tests.ranks import RankError, run_ranks
from tests.session.programs import dataset, network


@contextmanager
def small_disk(place: Path, *, kib: int):
    """Mounts a file system of so many KiB."""
    place.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("A small file system is mounted, which needs root and mount(8).")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"A small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def protect(place: Path) -> None:
    """Makes a folder read-only, also for root; what is open in it must be closed."""
    subprocess.run(["mount", "--bind", place, place], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)


def unprotect(place: Path) -> None:
    subprocess.run(["umount", "-l", place], check=True)


def train(folder_, *, epochs=4, on_step=lambda step: None, **settings):
    """Trains 7 steps an epoch, with a checkpoint at the end of each epoch; returns the parameters."""
    with Session(folder_, device="cpu", progress=False, **settings) as session:
        torch.manual_seed(5)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        synchronized, _, loader = session.prepare(model, optimizer, dataset(), plan=session.plan(batch_size=8))
        for _ in session.epochs(epochs):
            for x, y in loader:
                nn.functional.cross_entropy(synchronized(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                on_step(synchronized.schedule.step)
        return [parameter.detach().clone() for parameter in model.parameters()]


def steps(root: Path) -> list[int]:
    return [folder.step_of(path) for path in folder.checkpoints(root / "checkpoints")]


def fill(place: Path) -> None:
    """Leaves no byte of a file system free."""
    with (place / "ballast").open("wb", buffering=0) as stream:
        for size in (2**16, 1):
            with suppress(OSError):
                while True:
                    stream.write(b"x" * size)


def change_at(place: Path, how: str, *, bad: int, good: int = 0):
    """Returns what makes a file system full or read-only after one step, and as before after another."""

    def change(step: int) -> None:
        while step in (bad, good) and any(thread.name == "evenly-checkpoint" for thread in threading.enumerate()):
            time.sleep(0.01)  # the checkpoint of a step before is being written
        if step == bad:
            fill(place) if how == "full" else protect(place / "checkpoints")
        if step == good:
            (place / "ballast").unlink() if how == "full" else unprotect(place / "checkpoints")

    return change


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_disk_that_cannot_be_written_ends_the_run_with_a_typed_error(tmp_path, how):
    with small_disk(tmp_path / "disk", kib=1024) as disk:
        with pytest.raises(CheckpointWriteError, match=r"No space left|Read-only file system") as told:
            train(disk, on_step=change_at(disk, how, bad=10))
        assert "Make room there, or let this program write" in str(told.value)
        assert steps(disk) == [7]
        (disk / "ballast").unlink() if how == "full" else unprotect(disk / "checkpoints")
        whole = train(tmp_path / "whole")
        torch.testing.assert_close(train(disk), whole, rtol=0, atol=0)  # from the checkpoint before


@pytest.mark.parametrize("how", ["full", "read-only"])
@pytest.mark.parametrize("checkpoint_async", [True, False])
def test_a_run_goes_on_without_a_checkpoint_if_asked(tmp_path, caplog, how, checkpoint_async):
    """The disk can be written again in the last epoch: its checkpoint is saved, and the record is whole."""
    settings = {"checkpoint_errors": "warn", "checkpoint_async": checkpoint_async}
    with small_disk(tmp_path / "disk", kib=1024) as disk, caplog.at_level(logging.WARNING):
        kept = []

        def on_step(step: int) -> None:
            change_at(disk, how, bad=10, good=24)(step)
            kept.append(steps(disk))

        parameters = train(disk, on_step=on_step, **settings)
        torch.testing.assert_close(parameters, train(tmp_path / "whole"), rtol=0, atol=0)
        assert kept[-1] == [7]  # whole until there is a newer one
        assert steps(disk) == [7, 28]
        run = Run.read(disk)
        assert [event.step for event in run.of(CheckpointSaved)] == [7, 28]
        assert [event.step for event in run.of(CheckpointFailed)] == [14, 21]
        assert run.last(RunFinished).steps == 28
        assert not run.of(RunFailed)
    assert "the run goes on without a checkpoint of step 14" in caplog.text
    assert "No space left" in caplog.text or "Read-only file system" in caplog.text


def test_a_checkpoint_by_hand_gives_none_if_the_run_goes_on_without_it(tmp_path):
    settings = {"device": "cpu", "checkpoint_errors": "warn", "progress": False}
    with small_disk(tmp_path / "disk", kib=512) as disk, Session(disk, **settings) as session:
        fill(disk)
        assert session.checkpoint() is None
        (disk / "ballast").unlink()
        path = session.checkpoint()
        assert path is not None
        assert (path / "manifest.json").is_file()


def test_all_ranks_agree_that_one_of_them_has_no_room_and_what_it_wrote_is_removed(tmp_path):
    """Both ranks go on, and save again once there is room."""
    root = tmp_path / "checkpoints"
    save_steps(root, [1])

    def act(rank_group):
        with opened(rank_group, root) as checkpoints:
            grown = Grown(rank_group.rank)
            resume(checkpoints, grown)
            if rank_group.rank == 1:
                grown.size = -1  # of tensors that cannot be made
            with pytest.raises(CheckpointError, match=r"ranks \[1\] could not make the folder"):
                save(checkpoints, grown, 2)
            grown.size = 20_000
            assert [path.name for path in root.iterdir()] == ["step-000000001"]
            save(checkpoints, grown, 3)
            return [path.name for path in folder.checkpoints(root)]

    assert run_ranks(2, act) == [["step-000000001", "step-000000003"]] * 2


def test_a_disk_of_one_rank_that_is_full_is_told_to_both(tmp_path, monkeypatch):
    plain = folder.write_part

    def write_part(place, part):
        if part.name == "rank-1":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return plain(place, part)

    monkeypatch.setattr(folder, "write_part", write_part)
    with pytest.raises(RankError) as told:
        save_steps(tmp_path / "checkpoints", [1])
    for error in told.value.errors:
        assert isinstance(error, CheckpointWriteError)
        assert "ranks [1] could not write the checkpoint" in str(error)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_other_errors_end_the_run_also_if_those_of_the_disk_do_not(tmp_path):
    class Odd:
        def state_dict(self):
            return {"thing": object()}

        def load_state_dict(self, state):
            raise AssertionError

    with Session(tmp_path, device="cpu", checkpoint_errors="warn", progress=False) as session:
        session.track(odd=Odd())
        with pytest.raises(CheckpointError, match="thing") as told:
            session.checkpoint()
    assert not isinstance(told.value, CheckpointWriteError | CheckpointDamageError)


def test_the_record_is_no_reason_to_end_a_run_that_goes_on_without_checkpoints(tmp_path):
    """No line is lost or cut while the disk is full."""
    with small_disk(tmp_path / "disk", kib=256) as disk:
        with Session(disk, device="cpu", checkpoint_errors="warn", progress=False) as session:
            session.log(before=1.0)
            fill(disk)
            for number in range(300):
                session.log(during=float(number))
            (disk / "ballast").unlink()
            session.log(after=1.0)
        values = [event.values for event in Run.read(disk).events if event.event == "measured"]
        assert values == [{"before": 1.0}, *({"during": float(number)} for number in range(300)), {"after": 1.0}]
