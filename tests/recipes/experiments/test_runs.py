"""Every experiment runs end to end on unequal nodes, is killed midway, goes on, and gives the table of another one.

The nodes are those of an emulated cluster, or processes of this machine where it cannot be emulated.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from evenly.lab import missing
from evenly.recipes.experiments import experiment_names, load_experiment, planned_runs
from tests.recipes.cifar import write_cifar
from tests.recipes.data.pictures import write_birds, write_class_folders
from tests.recipes.images import write_images

DATA = Path(__file__).parents[3] / "data"
ONLY = {  # one or two runs of each
    "cifar": ["nodes=1,1", "every=10"],
    "finegrained": ["set=cub200", "every=5 epochs"],
    "gan": ["every=10"],
    "heterogeneous": ["net=mnist", "cut=even,70-25-5"],
    "imagenet": ["every=epoch"],
    "language": ["every=10"],
    "optimizers": ["optimizer=angulargrad-cos", "every=10"],
    "rnn": ["every=global,epoch"],
}
NODES = {"cifar": [1, 1], "optimizers": [1, 1], "heterogeneous": [3]}  # ranks of each node
UNEQUAL_NODES = [2, 1]  # of all others
LIMIT_S = 400
STARTED: "list[subprocess.Popen[bytes]]" = []


@pytest.fixture(autouse=True)
def _end_what_still_runs() -> Iterator[None]:
    yield
    for process in STARTED:
        if process.poll() is None:
            kill_all(process)
    STARTED.clear()


def test_every_experiment_is_tried() -> None:
    assert sorted(ONLY) == experiment_names()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ONLY))
def test_an_experiment_that_was_killed_goes_on_to_the_same_table(tmp_path: Path, name: str) -> None:
    kill_and_compare(tmp_path, name, *emulated_nodes(tmp_path, NODES.get(name, UNEQUAL_NODES)))


def emulated_nodes(folder: Path, num_ranks: list[int]) -> list[str]:
    """Returns options that start the ranks on emulated nodes with slow links, if this machine can emulate them."""
    if missing() is not None:
        return []
    nodes = [f'[[nodes]]\nname = "node{i}"\nranks = {count}\nrate_mbit = 200\n' for i, count in enumerate(num_ranks)]
    cluster = folder / "cluster.toml"
    cluster.write_text("\n".join(nodes))
    return ["--launcher", f"{sys.executable} -m evenly lab run {cluster} --output rank0 --"]


@pytest.mark.slow
def test_an_interruption_ends_the_runs_and_the_same_command_goes_on(tmp_path: Path) -> None:
    def interrupt(process: subprocess.Popen[bytes]) -> None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)  # is handled as Ctrl-C is
        assert process.wait(90) == 130
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    kill_and_compare(tmp_path, "rnn", "--set", "epochs=8", end=interrupt)  # long enough to be interrupted midway
    assert "the same command goes on from here" in log_of(tmp_path / "killed")


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kills the experiment and everything it has started, as a machine that fails does."""
    parent = psutil.Process(process.pid)
    for one in [parent, *parent.children(recursive=True)]:
        try:
            os.kill(one.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def kill_and_compare(
    tmp_path: Path, name: str, *more: str, end: Callable[[subprocess.Popen[bytes]], None] = kill_all
) -> None:
    data = data_of(name, tmp_path)
    whole = start(tmp_path / "whole", name, data, *more)
    assert whole.wait(LIMIT_S) == 0, log_of(tmp_path / "whole")
    killed = start(tmp_path / "killed", name, data, *more)
    wait_for_checkpoint(tmp_path / "killed", killed)
    end(killed)
    assert not (tmp_path / "killed" / "table.md").is_file() or table(tmp_path / "killed") != table(tmp_path / "whole")
    resumed = start(tmp_path / "killed", name, data, *more)
    assert resumed.wait(LIMIT_S) == 0, log_of(tmp_path / "killed")
    assert table(tmp_path / "killed") == table(tmp_path / "whole")
    count = len(planned_runs(load_experiment(name), quick=True, only=ONLY[name], seeds=1))
    done = f"in {tmp_path / 'killed'}, {count} of them done"
    before = log_of(tmp_path / "killed").count(done)
    again = start(tmp_path / "killed", name, data, *more)
    assert again.wait(60) == 0
    assert log_of(tmp_path / "killed").count(done) == before + 1  # there was nothing left to run


def data_of(name: str, folder: Path) -> Path:
    """Returns a folder with the experiment's data: real ones if they were fetched, else files of the same form."""
    wanted = {run.config.data for run in planned_runs(load_experiment(name), quick=True, only=ONLY[name], seeds=1)}
    if all((DATA / one).is_dir() for one in wanted):
        return DATA
    for one in wanted:
        WRITERS[one](folder / "data" / one)
    return folder / "data"


def write_text(folder: Path) -> None:
    folder.mkdir(parents=True)
    lines = (f"{number} times the same and yet another line\n" for number in range(800))
    (folder / "shakespeare.txt").write_text("".join(lines))


WRITERS: dict[str, Callable[[Path], object]] = {
    "cifar10": lambda folder: write_cifar(folder, batch=32, test=40),
    "cub200": write_birds,
    "imagenet": lambda folder: write_class_folders(folder, test="val", suffix="JPEG"),
    "mnist": lambda folder: write_images(folder, train=160, test=40),
    "shakespeare": write_text,
}


def start(folder: Path, name: str, data: Path, *more: str) -> subprocess.Popen[bytes]:
    words = [
        "experiment",
        name,
        "--quick",
        "--seeds",
        "1",
        "--to",
        str(folder),
        "--data",
        str(data),
        "--jobs",
        "2",
        *more,
    ]
    for only in ONLY[name]:
        words += ["--only", only]
    with folder.with_suffix(".log").open("ab") as log:
        command = [sys.executable, "-m", "evenly", *words]
        STARTED.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, process_group=0))
    return STARTED[-1]


def log_of(folder: Path) -> str:
    logs = [folder.with_suffix(".log"), *folder.rglob("output.log")]
    return "\n".join(file.read_text() for file in logs)


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: list(folder.rglob("checkpoints/step-*")), process, folder)


def wait_until(is_there: Callable[[], object], process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_there():
        assert process.poll() is None, log_of(folder)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def table(folder: Path) -> list[dict[str, object]]:
    """Returns what does not depend on the speed of the machine."""
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return [{key: value for key, value in row.items() if key != "epoch_s"} for row in rows]
