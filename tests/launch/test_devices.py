"""`--devices` and EVENLY_DEVICES: every rank computes on the device that was named for it, or nothing starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evenly.cli._devices import shared_in_cluster, shared_in_list
from evenly.errors import LaunchError
from evenly.launch import Place, pick_device
from evenly.spec import Cluster, Device, Node
from tests.launch.greetings import greetings

SCRIPT = str(Path(__file__).with_name("compute.py"))
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")


def place(rank: int, *, local_rank: int, local_size: int | None, of: int = 3) -> Place:
    return Place(rank=rank, world_size=of, local_rank=local_rank, local_size=local_size, launcher="arguments")


def evenly_command(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "TERMINAL_WIDTH": "400", **variables}
    command = [sys.executable, "-m", "evenly", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)


def test_each_rank_of_two_nodes_computes_on_its_device() -> None:
    done = evenly_command("launch", "--nodes", "2,1", "--devices", "cpu,cpu:0,cpu", SCRIPT)
    assert done.returncode == 0, done.stderr
    said = greetings(done.stdout)
    assert [each["session"] for each in said] == ["cpu"] * 3
    assert [each["by hand"] for each in said] == ["cpu"] * 3


@pytest.mark.gpu
def test_a_gpu_for_two_ranks_and_the_cpu_for_the_third() -> None:
    done = evenly_command("launch", "--nodes", "2,1", "--devices", "gpu:0,cpu:0,cuda:0", SCRIPT)
    assert done.returncode == 0, done.stderr
    said = greetings(done.stdout)
    assert [each["session"] for each in said] == ["cuda:0", "cpu", "cuda:0"]
    assert [each["by hand"] for each in said] == ["cuda:0", "cpu", "cuda:0"]
    assert said[0]["devices"] == ["cuda", "cpu", "cuda"]
    assert [each["asked"] for each in said] == ["cpu"] * 3  # an argument of the program counts more than the list
    assert all(each["sum"] == [6.0] for each in said)
    assert "ranks 0, 2 share cuda:0" in done.stderr


@pytest.mark.parametrize(
    ("listed", "where", "device"),
    [
        ("cpu,cuda:0,cuda:1", place(1, local_rank=1, local_size=3), "cuda:0"),
        ("cpu,gpu:0,cuda:1", place(2, local_rank=0, local_size=1), "cuda:1"),  # all ranks are listed
        ("cuda:1, cpu:0", place(1, local_rank=1, local_size=2), "cpu"),  # the ranks of a node are
        ("cuda:1,cpu", place(2, local_rank=0, local_size=2, of=4), "cuda:1"),
        ("cuda:1,cpu", place(3, local_rank=1, local_size=None, of=4), "cpu"),  # the launcher does not tell more
        ("cuda,cuda,cpu", place(1, local_rank=1, local_size=3), "cuda:1"),
        ("auto,auto,cpu", place(0, local_rank=0, local_size=3), "cuda:0"),
        ("", place(0, local_rank=0, local_size=3), "cuda:0"),
    ],
)
def test_a_rank_finds_its_device_in_the_list(
    monkeypatch: pytest.MonkeyPatch, listed: str, where: Place, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("EVENLY_DEVICES", listed)
    assert pick_device(where) == torch.device(device)
    assert pick_device(where, "cpu:0") == torch.device("cpu")
    assert pick_device(where, "gpu:1") == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("listed", "where", "told"),
    [
        ("cpu,cpu", place(2, local_rank=0, local_size=3), "has 2 devices; there are 3 ranks. Write one device for"),
        ("cpu,cpu,cpu,cpu", place(0, local_rank=0, local_size=2), "4 devices; there are 3 ranks, 2 of them on this"),
        ("cpu", place(1, local_rank=1, local_size=None), "has 1 device; there are 3 ranks"),
        ("cpu,tpu,cpu", place(0, local_rank=0, local_size=3), "'tpu' is not a device. Write cpu, cuda:0"),
        ("cpu,,cpu", place(0, local_rank=0, local_size=3), "'' is not a device"),
        ("cuda:-1,cpu,cpu", place(0, local_rank=0, local_size=3), "'cuda:-1' is not a device"),
        ("cpu:1,cpu,cpu", place(0, local_rank=0, local_size=3), "'cpu:1' is not a device"),
        (
            "cuda:77,cpu,cpu",
            place(0, local_rank=0, local_size=3),
            "'cuda:77' by EVENLY_DEVICES; this process sees",
        ),
        ("cpu,cpu", Place(rank=0, world_size=1, local_rank=0, launcher="alone"), "there is 1 rank. Write one device"),
    ],
)
def test_a_list_that_does_not_fit_is_an_error_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, listed: str, where: Place, told: str
) -> None:
    monkeypatch.setenv("EVENLY_DEVICES", listed)
    with pytest.raises(LaunchError, match=told):
        pick_device(where)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nodes", "2,1", "--devices", "cpu,cpu"], "--devices cpu,cpu has 2 devices; there are 3 ranks."),
        (["--nodes", "1", "--devices", "cpu,tpu"], "'tpu' is not a device. Write cpu"),
        (["--nodes", "1", "--devices", ""], "'' is not a device. Write cpu"),
        (
            ["--nodes", "2,1", "--node-rank", "1", "--master", "a:1", "--devices", "cpu,cpu"],
            "has 2 devices; there are 3 ranks, 1 of them on this node. Write one device for each rank of this node",
        ),
    ],
)
def test_a_list_that_does_not_fit_starts_nothing(words: list[str], told: str) -> None:
    done = evenly_command("launch", *words, SCRIPT)
    assert done.returncode == 2
    assert told in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""


@without_gpu
@pytest.mark.parametrize("words", [["launch", "--nodes", "2"], ["train", "fashion"]])
def test_a_gpu_that_is_not_there_starts_nothing(words: list[str]) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    script = [SCRIPT] if words[0] == "launch" else []
    done = evenly_command(*words, "--devices", "cpu,gpu:0", *script, **place, **master)
    assert done.returncode == 2
    told = " ".join(done.stderr.replace("│", " ").split())
    assert "--devices cpu,gpu:0 was given; torch sees no cuda:0 here, only cpu. Name devices that it sees" in told


def test_a_recipe_alone_says_how_to_start_several() -> None:
    done = evenly_command("train", "fashion", "--devices", "cpu,cpu")
    assert done.returncode == 2
    assert "there is 1 rank" in done.stderr
    assert "evenly launch --nodes 2 --devices cpu,cpu" in " ".join(done.stderr.replace("│", " ").split())


def test_ranks_that_share_a_gpu_are_told() -> None:
    assert shared_in_list(["cuda:0", "cpu", "cuda:1"]) == []
    (line,) = shared_in_list(["cuda:0", "cpu", "cuda:0", "cpu"], first_rank=2)
    assert line.startswith("ranks 2, 4 share cuda:0: ")
    own = [Device(kind="cuda", index=0, identity=name) for name in ("a", "b", "a")]
    cluster = Cluster(nodes=(Node(name="n", ranks=(0, 1, 2), devices=tuple(own)),))
    assert [line.partition(":")[0] for line in shared_in_cluster(cluster)] == ["ranks 0, 2 share cuda"]
