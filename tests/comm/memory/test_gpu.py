"""Moves between ranks that share a GPU, through its memory, and between GPUs and CPUs, through that of the host."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.comm.memory.test_deaths import check_deaths, check_stops
from tests.processes import run_processes

pytestmark = pytest.mark.gpu

DEVICES = {
    "device": ["cuda:0"] * 3,
    "four on a device": ["cuda:0"] * 4,
    "mixed": ["cuda:0", "cuda:0", "cpu"],
    "one each": ["cpu", "cuda:0"],
}


@pytest.mark.parametrize("devices", DEVICES.values(), ids=DEVICES.keys())
def test_random_moves(devices: list[str]) -> None:
    place = "device" if "cpu" not in devices else "host"
    arguments = {"arguments": {"devices": devices, "count": 300, "seed": 3, "place": place}}
    counts = run_processes(
        [range(len(devices))], "tests.comm.memory.programs:compare_random_moves", arguments, limit_s=120
    )
    assert min(counts) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("devices", "place"), [(DEVICES["device"], "device"), (DEVICES["mixed"], "host")])
def test_ten_thousand_random_moves(devices: list[str], place: str) -> None:
    arguments = {"arguments": {"devices": devices, "count": 5000, "seed": 9, "place": place}}
    run_processes([range(3)], "tests.comm.memory.programs:compare_random_moves", arguments, limit_s=400)


def test_sums_of_several_streams_at_a_time() -> None:
    arguments = {"arguments": {"count": 200}}
    for differences in run_processes([range(3)], "tests.comm.memory.programs:use_streams", arguments, limit_s=120):
        assert max(differences) == 0.0


@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("devices", [DEVICES["device"], DEVICES["mixed"]], ids=["device", "mixed"])
def test_ranks_that_die_or_stop_are_named_and_leave_no_device_memory(tmp_path: Path, devices: list[str]) -> None:
    before = used_mib()
    check_deaths(tmp_path, range(3), devices=devices)
    check_stops(tmp_path, range(2), devices=devices)
    until = time.monotonic() + 10
    while used_mib() > before + 16 and time.monotonic() < until:
        time.sleep(0.2)
    assert used_mib() <= before + 16


def used_mib() -> int:
    """Returns the memory of the first GPU that is in use."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
