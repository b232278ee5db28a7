"""`--bind`: every rank on cores of its own, and so is all that it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenly.errors import LaunchError
from evenly.launch import Place
from evenly.launch import binding as module
from evenly.launch.binding import bind_rank, share_of_cores
from tests.launch.greetings import greetings
from tests.processes import run_processes
from tests.ranks import ragged

SCRIPT = str(Path(__file__).with_name("cores.py"))
ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
linux = pytest.mark.skipif(not ALLOWED, reason="binds processes to cores as Linux does")


def shares(physical_cores: list[list[int]], count: int) -> list[list[int]]:
    return [list(share_of_cores(physical_cores, index=index, count=count)) for index in range(count)]


@pytest.mark.parametrize(
    ("physical_cores", "count", "expected"),
    [
        ([[0], [1], [2], [3]], 2, [[0, 1], [2, 3]]),
        ([[0], [1], [2], [3], [4]], 2, [[0, 1], [2, 3, 4]]),
        ([[0], [1], [2]], 1, [[0, 1, 2]]),
        ([[0], [1]], 5, [[0], [1], [0], [1], [0]]),  # more ranks than cores
        ([[0, 4], [1, 5], [2, 6], [3, 7]], 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),  # two hardware threads a core
        ([[0, 2], [1, 3]], 4, [[0], [2], [1], [3]]),  # not enough cores, but enough threads
        ([[3], [9], [11]], 2, [[3], [9, 11]]),  # the cores that a scheduler left
    ],
)
def test_cores_are_divided_among_ranks(physical_cores, count, expected):
    assert shares(physical_cores, count) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 12])
def test_no_core_is_left_over_or_given_twice(count):
    found = shares([[core, core + 12] for core in range(12)], count)
    assert sorted(core for cores in found for core in cores) == list(range(24))
    assert max(map(len, found)) - min(map(len, found)) <= 2


def say(command: list[str], **variables: str) -> list[dict]:
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
    done = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return greetings(done.stdout)


def require_own_cores(said: list[dict], expected: list[list[int]]) -> None:
    assert [each["cores"] for each in said] == expected
    assert [each["of a child"] for each in said] == expected
    assert [each["threads"] for each in said] == [str(len(cores)) for cores in expected]
    assert all(each["args"] == ["--threads", "-m"] for each in said)
    assert [each["bound again"] for each in said] == expected, "a bound rank keeps its cores"


@linux
@pytest.mark.slow
def test_ranks_of_two_nodes_on_one_machine_get_its_cores():
    said = say(["-m", "evenly", "launch", "--nodes", "2,1", "--bind", SCRIPT, "--threads", "-m"])
    require_own_cores(said, shares(module._physical_cores(set(ALLOWED)), 3))


@linux
def test_a_program_runs_on_the_cores_of_its_rank():
    said = []
    for rank in range(3):
        place = {"RANK": rank, "WORLD_SIZE": 5, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 3, "GROUP_RANK": 0}
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **{name: str(n) for name, n in place.items()}}
        said += say(["-m", "evenly.launch.bound", "--threads", SCRIPT, "--threads", "-m"], **variables)
    require_own_cores(said, shares(module._physical_cores(set(ALLOWED)), 3))


@linux
def test_ranks_of_a_recipe_divide_what_they_may_use():
    found = run_processes(ragged(2, 1), "tests.launch.cores:train")
    assert found == [*shares(module._physical_cores(set(ALLOWED)), 2), ALLOWED]  # the second node is another machine


@linux
def test_cores_that_srun_has_given_stay(monkeypatch):
    monkeypatch.setenv("SLURM_CPU_BIND_TYPE", "mask_cpu:")
    place = Place(rank=1, world_size=4, local_rank=1, local_size=4, launcher="slurm")
    assert list(bind_rank(place)) == ALLOWED == sorted(os.sched_getaffinity(0))


@linux
def test_a_launcher_that_does_not_tell_the_ranks_of_a_machine_is_named():
    place = Place(rank=1, world_size=4, local_rank=1, local_size=None, launcher="jsrun")
    with pytest.raises(LaunchError, match=r"its launcher \(jsrun\) does not tell how many ranks"):
        bind_rank(place)


def test_a_system_without_affinity_says_so(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    place = Place(rank=0, world_size=1, local_rank=0, launcher="alone")
    with pytest.raises(LaunchError, match=r"--bind was given; .* Leave it out"):
        bind_rank(place)


@linux
def test_neighbours_in_the_machine_stay_together(monkeypatch, tmp_path):
    """Numbered as on many machines with two packages and two hardware threads a core."""
    for thread, (package, core) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)] * 2):
        folder = tmp_path / f"cpu{thread}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    monkeypatch.setattr(module, "_TOPOLOGY", tmp_path)
    assert module._physical_cores(set(range(8))) == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert module._physical_cores({1, 5, 8}) == [[1, 5], [8]]  # 8 is not described
