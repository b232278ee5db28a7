"""The examples run as they stand: alone, and on two pretended nodes."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from evenly.spec import Run, RunStarted

pytestmark = pytest.mark.alone  # each starts several processes, and beside others they take minutes
EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))
TWICE = """
import runpy, sys
script = sys.argv[1]
for epochs in ("1", "2"):
    sys.argv = [script, "run", "--epochs", epochs]
    runpy.run_path(script, run_name="__main__")
"""


def start(*words: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: "subprocess.Popen[str]") -> str:
    with process:
        try:
            out, err = process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode == 0, out + err
    return out


def test_no_example_hides_the_library() -> None:
    assert NAMES == ["evenly_by_hand.py", "gan.py", "plain.py", "session.py", "shard.py"]
    assert "evenly.py" not in NAMES


def test_each_runs_alone_and_leaves_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        running = {name: start(str(EXAMPLES / name), folder=tmp_path) for name in NAMES}
        for process in running.values():
            stack.callback(process.kill)
        said = {name: end(process) for name, process in running.items()}
    for name in ("evenly_by_hand.py", "plain.py", "session.py"):
        assert float(re.findall(r"([\d.]+) % right", said[name])[0]) > 90, said[name]
    assert "radius" in said["gan.py"]
    assert "epoch 2: loss" in said["shard.py"]
    assert list(tmp_path.iterdir()) == []


def test_on_two_unequal_nodes_all_ranks_end_with_the_same_model(tmp_path: Path) -> None:
    words = ("-m", "evenly", "launch", "--nodes", "2,1", str(EXAMPLES / "evenly_by_hand.py"))
    found = re.findall(r"rank (\d) of 3: ([\d.]+) % right", end(start(*words, folder=tmp_path)))
    assert sorted(rank for rank, _ in found) == ["0", "1", "2"]
    assert len({right for _, right in found}) == 1


def test_a_session_goes_on_where_it_stood(tmp_path: Path) -> None:
    end(start("-c", TWICE, str(EXAMPLES / "session.py"), folder=tmp_path))
    started = Run.read(tmp_path / "run").of(RunStarted)
    assert [event.resumed_step for event in started] == [0, 30]


def test_by_hand_differs_from_plain_in_a_few_lines() -> None:
    plain, by_hand = ((EXAMPLES / name).read_text().splitlines() for name in ("plain.py", "evenly_by_hand.py"))
    gone = [line.strip() for line in plain if line.strip() and line not in by_hand]
    new = [line.strip() for line in by_hand if line.strip() and line not in plain]
    assert len(gone) <= 3
    assert len(new) <= 5
