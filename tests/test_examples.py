"""The examples run as they stand: alone, and on two pretended nodes."""

import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import evenly
from evenly.cli import app
from evenly.spec import EpochDone, Measured, Run, RunStarted, RunStopped
from tests.processes import Rank, collect, run_processes
from tests.ranks import ragged

pytestmark = pytest.mark.timeout(300)  # each starts several processes, and beside others they take minutes
LIMIT_S = 240.0
EXAMPLES = Path(__file__).parents[1] / "examples"
EPOCHS = 12  # of the complete script, which stops much earlier
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))


def start(name: str, folder: Path, *words: Sequence[str]) -> Rank:
    """Starts an example alone, once for each of `words`."""
    arguments = {"script": str(EXAMPLES / name), "words": words or [[]], "folder": str(folder)}
    return Rank("tests.scripts:run_script", arguments, {})


def test_no_example_hides_the_library() -> None:
    complete = ["complete.py", "complete_by_hand.py", "complete_evenly.py"]
    assert [*complete, "evenly_by_hand.py", "gan.py", "plain.py", "session.py", "shard.py"] == NAMES
    assert "evenly.py" not in NAMES


def test_each_runs_alone_and_leaves_nothing(tmp_path: Path) -> None:
    words = {name: [["run"] if name == "complete_evenly.py" else ["folder"]] for name in NAMES if "complete" in name}
    ranks = collect([start(name, tmp_path, *words.get(name, [[]])) for name in NAMES], limit_s=LIMIT_S)
    assert all(rank.code == 0 for rank in ranks), [rank.errors[-2000:] for rank in ranks]
    said = {name: rank.result for name, rank in zip(NAMES, ranks, strict=True)}
    for name in ("evenly_by_hand.py", "plain.py", "session.py"):
        assert float(re.findall(r"([\d.]+) % right", said[name])[0]) > 90, said[name]
    assert "radius" in said["gan.py"]
    assert said["complete.py"] == said["complete_by_hand.py"] != ""
    assert "epoch 2: loss" in said["shard.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run"]  # which they were told


def test_on_two_unequal_nodes_all_ranks_end_with_the_same_model(tmp_path: Path) -> None:
    arguments = {"script": str(EXAMPLES / "evenly_by_hand.py"), "words": [[]], "folder": str(tmp_path)}
    said = run_processes(ragged(2, 1), "tests.scripts:run_script", arguments, limit_s=LIMIT_S)
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
    (rank,) = collect(
        [start("session.py", tmp_path, ["run", "--epochs", "1"], ["run", "--epochs", "2"])], limit_s=LIMIT_S
    )
    assert rank.code == 0, rank.errors
    started = Run.read(tmp_path / "run").of(RunStarted)
    assert [event.resumed_step for event in started] == [0, 30]


def test_the_complete_script_stops_early_and_its_best_weights_are_as_good_on_one_device(tmp_path: Path) -> None:
    run, best = tmp_path / "run", tmp_path / "best.safetensors"
    train_on_two_nodes("complete_evenly.py", tmp_path, "run")
    record = Run.read(run)
    accuracies = [event.values["accuracy"] for event in record.of(Measured)]
    assert accuracies[-1] <= accuracies[-2] == max(accuracies)  # patience of one epoch
    assert record.last(RunStopped).epoch == record.of(EpochDone)[-1].epoch == len(accuracies) < EPOCHS
    done = CliRunner().invoke(app, ["export", str(run), "--best", "--to", str(best)])
    assert done.exit_code == 0, done.output
    assert accuracy_on_one_device(best) == max(accuracies) > 0.5
    assert accuracy_on_one_device(run) == accuracies[-1]  # the newest checkpoint has what the loop ended with


def test_the_complete_script_by_hand_saves_weights_that_are_as_good_on_one_device(tmp_path: Path) -> None:
    said = train_on_two_nodes("complete_by_hand.py", tmp_path, "folder")
    accuracies = [float(accuracy) for accuracy in re.findall(r"accuracy ([\d.]+)", "".join(said))]
    assert len(accuracies) < EPOCHS
    assert accuracy_on_one_device(tmp_path / "folder" / "best.pt") == max(accuracies) > 0.5


def train_on_two_nodes(name: str, folder: Path, *words: str) -> list[str]:
    words = (*words, "--epochs", str(EPOCHS), "--patience", "1")
    arguments = {"script": str(EXAMPLES / name), "words": [words], "folder": str(folder)}
    said: list[str] = run_processes(ragged(2, 1), "tests.scripts:run_script", arguments, limit_s=LIMIT_S)
    return said


def accuracy_on_one_device(source: Path) -> float:
    plain = runpy.run_path(str(EXAMPLES / "complete.py"))
    network, validation = plain["network"](), plain["waves"](500, seed=1)
    evenly.load_weights(network, source)
    right: float = plain["evaluate"](network, DataLoader(validation, batch_size=250), torch.device("cpu"))
    return right / len(validation)


@pytest.mark.parametrize(
    ("plain", "other", "most_gone", "most_new"),
    [
        ("plain.py", "evenly_by_hand.py", 3, 5),
        ("complete.py", "complete_by_hand.py", 3, 5),
        ("complete.py", "complete_evenly.py", 40, 15),
    ],
)
def test_few_lines_differ_from_plain_torch(plain: str, other: str, most_gone: int, most_new: int) -> None:
    before, after = (code_lines(EXAMPLES / name) for name in (plain, other))
    assert len([line for line in before if line not in after]) <= most_gone
    assert len([line for line in after if line not in before]) <= most_new


def code_lines(path: Path) -> list[str]:
    """Returns the lines without the docstring at the top, blank lines and indentation."""
    text = path.read_text().split('"""', 2)[2]
    return [line.strip() for line in text.splitlines() if line.strip()]
