"""A process that is stopped or killed in a step, an exchange or a save: the others name it and end in time."""

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


def fail_at(tmp_path, nodes, victim: int, **arguments) -> tuple[list[Rank], int, float]:
    """Returns the other ranks, ended, the victim's process id and the seconds from its stop to the end of the last."""
    settings = {"folder": str(tmp_path / "run"), "timeout_s": TIMEOUT_S, "crash_rank": victim, "epochs": 100}
    ranks = start_processes(nodes, TRAIN, {**settings, "crash_step": 3, "pause_s": 0.02, **arguments})
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
        ranks[victim].process.kill()
        ranks[victim].process.join()
        ranks[victim].folder.cleanup()
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
    others, pid, seconds = fail_at(tmp_path, nodes, victim, **{"how": how, **settings})
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
