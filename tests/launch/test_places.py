"""Who a process is: recorded environments of every launcher, arguments, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenly.errors import LaunchError, SpecError
from evenly.launch import Place, environment, find_place, identity, overlay

RECORDED = sorted((Path(__file__).parent / "environments").glob("*.json"))
TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_recorded_process_finds_its_place(path: Path) -> None:
    for process in json.loads(path.read_text())["processes"]:
        assert find_place(process["environ"]) == Place(**process["place"])


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "2"}, ["RANK='2' is set but WORLD_SIZE is not"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE='2' is set but RANK is not"]),
        ({**TWO, "RANK": "2"}, ["RANK='2' is not below WORLD_SIZE='2'"]),
        ({**TWO, "RANK": "one"}, ["RANK", "'one'", "whole number"]),
        ({**TWO, "RANK": "-1"}, ["RANK", "'-1'"]),
        ({**TWO, "WORLD_SIZE": ""}, ["WORLD_SIZE", "''"]),
        ({**TWO, "LOCAL_WORLD_SIZE": "1"}, ["LOCAL_RANK='1' of 1 local ranks"]),
        ({**TWO, "LOCAL_WORLD_SIZE": "3"}, ["3 local ranks", "WORLD_SIZE='2'"]),
        ({**TWO, "MASTER_PORT": "70000"}, ["MASTER_PORT", "'70000'"]),
        ({**TWO, "MASTER_PORT": "http"}, ["MASTER_PORT", "'http'"]),
        ({name: TWO[name] for name in TWO if name != "LOCAL_RANK"}, ["RANK='1'", "LOCAL_RANK is not"]),
        ({name: TWO[name] for name in TWO if name != "MASTER_PORT"}, ["MASTER_PORT is not set"]),
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}, ["RANK is not"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_RANK='0'", "OMPI_COMM_WORLD_SIZE is not"]),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ["-x MASTER_ADDR=", "-x MASTER_PORT="]),
        (HYDRA, ["-genv MASTER_ADDR", "-genv MASTER_PORT"]),
        ({"PMI_ID": "0", "MPI_LOCALRANKID": "0", "PMI_PORT": "a:1"}, ["PMI_RANK is not"]),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["MPI_LOCALRANKID is not"]),
        ({**STEP, "SLURM_PROCID": "3"}, ["SLURM_PROCID='3' is not below SLURM_STEP_NUM_TASKS='3'"]),
        ({**STEP, "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2,1"}, ["SLURM_NODEID='2'", "'2,1'"]),
        ({**STEP, "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2,?"}, ["'2,?'"]),
        ({**STEP, "SLURM_STEP_NODELIST": "n[2-1]"}, ["'n[2-1]'"]),
        (STEP, ["MASTER_ADDR is not set"]),
    ],
)
def test_what_does_not_fit_is_named_with_its_value(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        find_place(environ)
    assert all(word in str(caught.value) for word in words), caught.value


def test_arguments_beat_the_environment() -> None:
    place = find_place(TWO, rank=3, world_size=5, local_rank=0, master_addr="b", master_port=1)
    assert place == Place(rank=3, world_size=5, local_rank=0, launcher="arguments", master_addr="b", master_port=1)
    assert find_place(TWO, master_port=7).master_port == 7
    assert find_place(TWO, local_rank=0).local_rank == 0
    assert find_place({}, local_rank=3).local_rank == 3
    assert find_place({}, rank=0, world_size=1) == Place(rank=0, world_size=1, local_rank=0, launcher="arguments")
    assert find_place(HYDRA, master_addr="n1", master_port=29500).master_addr == "n1"


def test_a_local_rank_is_never_computed_from_a_rank() -> None:
    with pytest.raises(LaunchError, match=r"LOCAL_RANK is not.*rank=1, world_size=2"):
        find_place({}, rank=1, world_size=2, master_addr="a", master_port=1)


def test_half_an_argument_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"WORLD_SIZE is not.*Arguments.*rank=1"):
        find_place({}, rank=1)


def test_without_an_argument_the_environment_of_this_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    assert find_place() == find_place(dict(os.environ))
    assert find_place().rank == 1
    assert environment("RANK") == "1"
    assert environment("EVENLY_NO_SUCH_VARIABLE") is None
    assert overlay({"RANK": "0"}) == {**os.environ, "RANK": "0"}


def test_an_impossible_place_cannot_be_made() -> None:
    for fields in ({"rank": 2}, {"local_rank": 2}, {"local_size": 3}, {"master_addr": "a"}):
        with pytest.raises(SpecError):
            Place(**{"rank": 0, "world_size": 2, "local_rank": 0, "launcher": "arguments", **fields})


def test_an_identity_tells_where_the_process_runs() -> None:
    place = find_place({**TWO, "GROUP_RANK": "1"})
    marks = identity(place)
    assert marks.pid == os.getpid()
    assert marks.node_id == "1"
    assert marks.hostname
    assert marks == identity(place)


def test_finding_a_place_does_not_import_torch() -> None:
    code = (
        "import sys; from evenly.launch import Place, find_place, identity, environment\n"
        "identity(find_place({})); import evenly.cli.launch; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
