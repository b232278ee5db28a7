"""A program that catches the error of a lost rank and ends, its model not closed, ends with its own exit code."""

import os
import signal
import subprocess
import sys
import time

import pytest

from evenly.launch.ports import free_port
from tests.nodes.catching import OWN_CODE

CODES = {"kill": -9, "exit": 4, "raise": 1}  # of the rank that leaves
LIMIT_S = 110.0  # a run takes 10 s, beside other tests 40
LOCAL_RANKS, NODES = [0, 1, 0], [0, 0, 1]


def start(how: str, lost_rank: int) -> "list[subprocess.Popen[str]]":
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3", "GLOO_SOCKET_IFNAME": "lo"}
    places = [
        {"RANK": str(rank), "LOCAL_RANK": str(LOCAL_RANKS[rank]), "GROUP_RANK": str(NODES[rank])} for rank in range(3)
    ]
    return [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.nodes.catching", how, str(lost_rank)],
            env={**os.environ, **world, **place},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]


def outputs_of(process: "subprocess.Popen[str]", deadline: float) -> tuple[str, str]:
    """Returns what a rank printed; one that has not ended by then is aborted, and prints where its threads are."""
    try:
        return process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        return process.communicate()


def end_as_they_say(how: str, lost_rank: int) -> None:
    ranks = start(how, lost_rank)
    deadline = time.monotonic() + LIMIT_S
    said = [outputs_of(process, deadline) for process in ranks]
    codes = [process.returncode for process in ranks]
    assert codes == [CODES[how] if rank == lost_rank else OWN_CODE for rank in range(3)], said
    for rank in {0, 1, 2} - {lost_rank}:
        assert said[rank][0] == "caught PeerError\n"
        assert "terminate called" not in said[rank][1]
        assert "Fatal Python error" not in said[rank][1]


def test_ranks_that_catch_the_error_end_with_their_own_code() -> None:
    end_as_they_say("kill", 1)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "lost_rank"), [("kill", 0), ("kill", 2), ("exit", 1), ("raise", 2)])
def test_they_do_so_however_a_rank_leaves(how: str, lost_rank: int) -> None:
    end_as_they_say(how, lost_rank)
