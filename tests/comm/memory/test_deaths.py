"""Ranks that die or stop inside of moves through shared memory: the others name them, and leave nothing."""

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Rank, collect, start_processes

SIZE = 3
LIMIT_S = 1.0  # from the death, or from the time limit of a wait


def start(
    folder: Path, *, seed: int, timeout_s: float, devices: Sequence[str] = ("cpu",) * SIZE
) -> tuple[list[Rank], list[int]]:
    """Starts the ranks and waits until all of them move tensors; returns them and their process ids."""
    arguments = {"arguments": {"folder": str(folder), "seed": seed, "timeout_s": timeout_s, "devices": list(devices)}}
    ranks = start_processes([list(range(SIZE))], "tests.comm.memory.programs:move_until_it_fails", arguments)
    files = [folder / f"ready{rank}" for rank in range(SIZE)]
    until = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until, [rank.errors for rank in ranks]
        time.sleep(0.01)
    return ranks, [int(file.read_text()) for file in files]


def trial(
    folder: Path,
    victim: int,
    signal_number: int,
    *,
    seed: int,
    timeout_s: float,
    devices: Sequence[str] = ("cpu",) * SIZE,
) -> list[dict[str, Any]]:
    """Sends a signal to one rank at a random moment; returns what the others say, and how soon after it."""
    folder.mkdir()
    ranks, pids = start(folder, seed=seed, timeout_s=timeout_s, devices=devices)
    time.sleep(random.Random(seed).uniform(0, 0.3))
    sent_s = time.monotonic()
    os.kill(pids[victim], signal_number)
    survivors = [rank for number, rank in enumerate(ranks) if number != victim]
    try:
        collect(survivors, limit_s=timeout_s + 30)
    finally:
        ranks[victim].kill()
    assert [rank.code for rank in survivors] == [0, 0], [rank.errors[-2000:] for rank in survivors]
    said = [rank.result for rank in survivors]
    return [
        {**row, "after_s": row["at_s"] - sent_s, "stderr": r.errors} for row, r in zip(said, survivors, strict=True)
    ]


def check_deaths(folder: Path, seeds: Sequence[int], *, devices: Sequence[str] = ("cpu",) * SIZE) -> None:
    for seed in seeds:
        victim = seed % SIZE
        for row in trial(folder / f"kill{seed}", victim, signal.SIGKILL, seed=seed, timeout_s=30.0, devices=devices):
            assert row["error"] in ("PeerError", "LockstepError"), row
            assert f"rank {victim} on " in row["text"], row
            assert row["after_s"] < LIMIT_S, row
            assert row["mapped"] == 0, row


def check_stops(
    folder: Path, seeds: Sequence[int], *, timeout_s: float = 1.5, devices: Sequence[str] = ("cpu",) * SIZE
) -> None:
    for seed in seeds:
        victim = seed % SIZE
        for row in trial(
            folder / f"stop{seed}", victim, signal.SIGSTOP, seed=seed, timeout_s=timeout_s, devices=devices
        ):
            assert row["error"] == "PeerError", row
            assert f"rank {victim} on " in row["text"], row
            assert timeout_s - 0.2 < row["after_s"] < timeout_s + LIMIT_S, row
            assert row["mapped"] == 0, row


@pytest.mark.alone
def test_a_rank_that_is_killed_is_named_at_once(tmp_path: Path) -> None:
    check_deaths(tmp_path, range(3))


@pytest.mark.alone
def test_a_rank_that_is_stopped_is_named_at_the_time_limit_and_in_a_warning_before(tmp_path: Path) -> None:
    for row in trial(tmp_path / "stop", 1, signal.SIGSTOP, seed=4, timeout_s=2.0):
        assert "rank 1 on " in row["text"]
        assert "is stopped" in row["stderr"]


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deaths_and_stops_at_many_moments(tmp_path: Path) -> None:
    count = int(os.environ.get("EVENLY_TEST_DEATHS", "12"))
    check_deaths(tmp_path, range(100, 100 + count))
    check_stops(tmp_path, range(200, 200 + count))
