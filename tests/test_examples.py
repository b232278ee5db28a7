"""The examples run as they stand: alone, and on two pretended nodes."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from evenly.spec import Run, RunStarted
from tests.processes import Rank, collect, run_processes
from tests.ranks import ragged

pytestmark = pytest.mark.alone  # each starts several processes, and beside others they take minutes
EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))


def start(name: str, folder: Path, *words: Sequence[str]) -> Rank:
    """Starts an example alone, once for each of `words`."""
    arguments = {"script": str(EXAMPLES / name), "words": words or [[]], "folder": str(folder)}
    return Rank("tests.scripts:run_script", arguments, {})


def test_no_example_hides_the_library() -> None:
    assert NAMES == ["evenly_by_hand.py", "gan.py", "plain.py", "session.py", "shard.py"]
    assert "evenly.py" not in NAMES


def test_each_runs_alone_and_leaves_nothing(tmp_path: Path) -> None:
    ranks = collect([start(name, tmp_path) for name in NAMES], limit_s=90.0)
    assert all(rank.code == 0 for rank in ranks), [rank.errors[-2000:] for rank in ranks]
    said = {name: rank.result for name, rank in zip(NAMES, ranks, strict=True)}
    for name in ("evenly_by_hand.py", "plain.py", "session.py"):
        assert float(re.findall(r"([\d.]+) % right", said[name])[0]) > 90, said[name]
    assert "radius" in said["gan.py"]
    assert "epoch 2: loss" in said["shard.py"]
    assert list(tmp_path.iterdir()) == []


def test_on_two_unequal_nodes_all_ranks_end_with_the_same_model(tmp_path: Path) -> None:
    arguments = {"script": str(EXAMPLES / "evenly_by_hand.py"), "words": [[]], "folder": str(tmp_path)}
    said = run_processes(ragged(2, 1), "tests.scripts:run_script", arguments, limit_s=90.0)
    found = [re.findall(r"rank (\d) of 3: ([\d.]+) % right", text)[0] for text in said]
    assert sorted(rank for rank, _ in found) == ["0", "1", "2"]
    assert len({right for _, right in found}) == 1


@pytest.mark.slow
def test_the_launcher_runs_an_example_on_two_unequal_nodes(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "evenly", "launch", "--nodes", "2,1", str(EXAMPLES / "evenly_by_hand.py")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"rank (\d) of 3: ([\d.]+) % right", done.stdout)
    assert sorted(rank for rank, _ in found) == ["0", "1", "2"]
    assert len({right for _, right in found}) == 1


def test_a_session_goes_on_where_it_stood(tmp_path: Path) -> None:
    (rank,) = collect([start("session.py", tmp_path, ["run", "--epochs", "1"], ["run", "--epochs", "2"])], limit_s=90.0)
    assert rank.code == 0, rank.errors
    started = Run.read(tmp_path / "run").of(RunStarted)
    assert [event.resumed_step for event in started] == [0, 30]


def test_by_hand_differs_from_plain_in_a_few_lines() -> None:
    plain, by_hand = ((EXAMPLES / name).read_text().splitlines() for name in ("plain.py", "evenly_by_hand.py"))
    gone = [line.strip() for line in plain if line.strip() and line not in by_hand]
    new = [line.strip() for line in by_hand if line.strip() and line not in plain]
    assert len(gone) <= 3
    assert len(new) <= 5
