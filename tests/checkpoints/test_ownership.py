"""One run at a time has a folder; what a killed run left behind does not keep the next one out."""

import json
import os
import signal
import threading
import time

import pytest

from evenly import Session
from evenly.checkpoints import ownership
from evenly.checkpoints.ownership import OWNER, is_held_by, take_folder
from evenly.errors import CheckpointError
from tests.processes import Rank, collect, start_processes
from tests.ranks import ragged

TRAIN = "tests.session.programs:train"
HOLD = "tests.session.programs:hold"


def start_holder(folder, ready, *, forks=False) -> Rank:
    """Returns a process that has taken the folder."""
    process = Rank(HOLD, {"folder": str(folder), "ready": str(ready), "forks": forks}, {})
    until = time.monotonic() + 60
    while not ready.exists() and process.code is None and time.monotonic() < until:
        time.sleep(0.01)
    return process


@pytest.fixture
def holder(tmp_path, tmp_path_factory):
    """A process that holds the folder."""
    process = start_holder(tmp_path, tmp_path_factory.mktemp("ready") / "held")
    yield process
    process.kill()


def foreign(tmp_path, **fields):
    """Leaves the file of an owner on another machine."""
    entry = {"token": "far", "host": "far", "pid": 7, "boot": "another", "since": "2020-01-01 00:00:00", **fields}
    (tmp_path / OWNER).write_text(json.dumps(entry).ljust(4096))


def test_a_held_folder_is_refused_with_its_holder_and_free_once_that_is_killed(tmp_path, holder):
    with pytest.raises(CheckpointError, match=rf"holds it: process {holder.process.pid} on \S+, since 20\d\d-"):
        take_folder(tmp_path, "mine")
    assert is_held_by(tmp_path, "other")
    os.kill(holder.process.pid, signal.SIGSTOP)  # a stopped run may go on
    with pytest.raises(CheckpointError, match="holds it"):
        take_folder(tmp_path, "mine")
    holder.process.kill()
    holder.process.join()
    began = time.monotonic()
    take_folder(tmp_path, "mine").release()
    assert time.monotonic() - began < 10
    assert not (tmp_path / OWNER).exists()


def test_a_second_session_of_the_same_process_is_refused(tmp_path):
    with Session(tmp_path / "run"), pytest.raises(CheckpointError, match=f"process {os.getpid()}"):
        Session(tmp_path / "run").__enter__()
    with Session(tmp_path / "run"):
        pass


def test_workers_that_outlive_a_killed_run_hold_nothing(tmp_path, tmp_path_factory):
    process = start_holder(tmp_path, tmp_path_factory.mktemp("ready") / "held", forks=True)
    children = [int(pid) for pid in _children(process.process.pid)]
    process.kill()
    try:
        assert children
        take_folder(tmp_path, "mine").release()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
        return file.read().split()


def test_another_machine_that_still_renews_its_lease_is_respected(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "LEASE_S", 3.0)
    foreign(tmp_path, renewals=1)
    timer = threading.Timer(0.5, foreign, [tmp_path], {"renewals": 2})
    timer.start()
    with pytest.raises(CheckpointError, match="process 7 on far, since 2020"):
        take_folder(tmp_path, "mine")
    timer.join()


@pytest.mark.parametrize("left", ["lease", "nothing", "noise"])
def test_what_a_killed_run_of_another_machine_left_is_taken_over(tmp_path, monkeypatch, left):
    monkeypatch.setattr(ownership, "LEASE_S", 0.5)
    if left == "lease":
        foreign(tmp_path)
    else:
        (tmp_path / OWNER).write_text("" if left == "nothing" else "[" * 4000)
    owner = take_folder(tmp_path, "mine")
    try:
        owner.require()
        assert is_held_by(tmp_path, "mine")
    finally:
        owner.release()
    assert not (tmp_path / OWNER).exists()


def test_a_run_whose_folder_was_taken_writes_nothing_more(tmp_path):
    owner = take_folder(tmp_path, "mine")
    try:
        owner.require()
        foreign(tmp_path)
        with pytest.raises(CheckpointError, match="another run has taken it"):
            owner.require()
    finally:
        owner.release()
    assert (tmp_path / OWNER).exists()  # that of the other run


def test_two_runs_in_one_folder_are_not_mixed(tmp_path):
    """The first goes on; all ranks of the second say who has the folder, and it can be resumed once it is free."""
    arguments = {"folder": str(tmp_path / "run"), "epochs": 1000, "pause_s": 0.02}
    first = start_processes(ragged(1), TRAIN, arguments)
    try:
        until = time.monotonic() + 60
        while not list(tmp_path.glob("run/checkpoints/step-*")) and time.monotonic() < until:
            time.sleep(0.05)
        second = collect(start_processes(ragged(1, 1), TRAIN, {**arguments, "epochs": 1}))
        assert all(rank.code == 1 for rank in second)
        for rank in second:
            assert f"process {first[0].process.pid} on " in rank.errors.strip().splitlines()[-1]
        assert first[0].code is None
    finally:
        first[0].kill()
    third = collect(start_processes(ragged(1), TRAIN, {**arguments, "epochs": 1}))
    assert third[0].code == 0, third[0].errors


def test_a_copy_of_the_folder_by_the_run_itself_gives_it_to_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "RENEW_EVERY_S", 0.05)
    owner = take_folder(tmp_path, "mine")
    try:
        copied = (tmp_path / OWNER).read_bytes()  # closing the file drops all locks that this process has on it
        handle = os.open(tmp_path / OWNER, os.O_RDONLY)
        while ownership.read_owner(handle)["renewals"] < json.loads(copied)["renewals"] + 2:
            time.sleep(0.01)
        taking = Rank(HOLD, {"folder": str(tmp_path), "ready": str(tmp_path / "held")}, {})
        assert taking.end(60)
        os.close(handle)
        assert f"holds it: process {os.getpid()}" in taking.errors
        owner.require()
    finally:
        owner.release()
