"""A process that is stopped or killed in a step, an exchange or a save: the others name it and end in time."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.processes import Rank, collect, start_processes
from tests.ranks import ragged

TRAIN = "tests.session.programs:train"
TIMEOUT_S = 4.0
SLACK_S = 8.0  # to notice, to give up connections and to end the interpreter, on a busy machine

pytestmark = pytest.mark.alone  # what is judged is when processes end


def fail_at(tmp_path, nodes, victim: int, **arguments) -> tuple[list[Rank], int, float]:
    """Returns the other ranks, ended, the victim's process id and the seconds from its stop to the end of the last."""
    settings = {"folder": str(tmp_path / "run"), "timeout_s": TIMEOUT_S, "crash_rank": victim, "epochs": 100}
    return watch(start_processes(nodes, TRAIN, {**settings, "crash_step": 3, "pause_s": 0.02, **arguments}), victim)


def watch(ranks: list[Rank], victim: int) -> tuple[list[Rank], int, float]:
    pid = ranks[victim].process.pid
    assert pid is not None
    others = [rank for number, rank in enumerate(ranks) if number != victim]
    try:
        until = time.monotonic() + 60
        while _state(pid) not in "TZ" and time.monotonic() < until:
            time.sleep(0.02)
        began = time.monotonic()
        collect(others, limit_s=60.0)
        seconds = time.monotonic() - began
    finally:
        ranks[victim].kill()
    return others, pid, seconds


def _state(pid: int) -> str:
    """Returns the letter for the state of a process; Z if it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


PLACES = {
    "step": {"every": 1000, "checkpoint_every": None},
    "exchange": {"every": 1, "checkpoint_every": None, "nodes": ragged(1, 1)},
    "save": {"every": 1000, "checkpoint_every": 2},
}


def require_named(tmp_path, how: str, victim: int, place: str, *, limit_s: float) -> None:
    settings = dict(PLACES[place])
    nodes = settings.pop("nodes", ragged(2))
    if place == "save":
        settings["how"] = f"{how} while saving"
    require_ended(*fail_at(tmp_path, nodes, victim, **{"how": how, **settings}), victim=victim, limit_s=limit_s)


def require_ended(others: list[Rank], pid: int, seconds: float, *, victim: int, limit_s: float) -> None:
    for rank in others:
        assert rank.code not in (0, -signal.SIGABRT), rank.errors[-3000:]
        last = rank.errors.strip().splitlines()[-1]
        assert re.search(rf"PeerError: .*rank {victim} on \S+ \(pid {pid}\)", last), rank.errors[-3000:]
    assert seconds < limit_s, others[0].errors[-3000:]


@pytest.mark.parametrize("place", PLACES)
def test_a_stopped_host_of_the_store_is_named_and_all_end_in_time(tmp_path, place):
    require_named(tmp_path, "stop", 0, place, limit_s=TIMEOUT_S + SLACK_S)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_another_stopped_rank_is_named_and_all_end_in_time(tmp_path, place):
    require_named(tmp_path, "stop", 1, place, limit_s=TIMEOUT_S + SLACK_S)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named(tmp_path, victim, place):
    require_named(tmp_path, "kill", victim, place, limit_s=SLACK_S)


def test_a_killed_rank_is_named_in_a_step(tmp_path):
    require_named(tmp_path, "kill", 1, "step", limit_s=SLACK_S)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", ["synchronize", "shard"])
def test_a_loop_by_hand_ends_as_well(what, victim):
    arguments = {"what": what, "victim": victim, "timeout_s": TIMEOUT_S}
    ended = watch(start_processes(ragged(2), "tests.session.programs:by_hand", arguments), victim)
    require_ended(*ended, victim=victim, limit_s=TIMEOUT_S + SLACK_S)


@pytest.mark.slow
def test_a_rank_that_goes_on_in_time_is_not_missed(tmp_path):
    """Stopped for less than the time limit, and so are all at once for longer."""
    arguments = {"folder": str(tmp_path / "run"), "timeout_s": 6.0, "epochs": 8, "pause_s": 0.05, "every": 3}
    ranks = start_processes(ragged(1, 1), TRAIN, arguments)
    until = time.monotonic() + 60
    while not list(tmp_path.glob("run/checkpoints/step-*")) and time.monotonic() < until:
        time.sleep(0.05)
    for stopped, seconds in ((ranks[:1], 3.0), (ranks, 8.0)):
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in stopped:
                os.kill(rank.process.pid, number)
            time.sleep(seconds if number == signal.SIGSTOP else 0.5)
    for rank in collect(ranks):
        assert rank.code == 0, rank.errors
