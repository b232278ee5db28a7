"""`evenly doctor` says what the machine can do, and what to type for what it cannot."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evenly.cli import _checks, app
from evenly.cli._checks import EXTRAS, Check, check_machine, data_checks, gpu_checks, lab_check, torch_checks
from tests.recipes.images import write_images

FACTS = {
    "version": "2.13.0",
    "cuda": None,
    "hip": None,
    "backends": {"gloo": True, "nccl": False, "mpi": False},
    "gpus": [],
}
GPU = {"name": "H200", "memory_bytes": 141 * 2**30}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_machine_trains_and_every_line_is_ok_or_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "evenly", "doctor", "--json"], capture_output=True, text=True, timeout=100
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["can_train"]) == (0, True)
    checks = by_name([Check(**row) for row in found["checks"]])
    assert {"python", "torch", "training", "gloo", "nccl", "mpi", "CPU", "lab"} <= checks.keys()
    assert {"Fashion-MNIST", "CIFAR-10", "MNIST", *EXTRAS, "torchrun", "srun", "mpirun", "ray"} <= checks.keys()
    assert checks["training"].state == checks["torchrun"].state == "ok"
    for check in checks.values():
        assert check.detail
        assert bool(check.remedy) == (check.state in ("missing", "broken")), check


def test_the_table_fits_one_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "read_torch_facts", lambda: FACTS)
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"})
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "ok       torch" in result.output


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"problem": "ModuleNotFoundError: No module named 'torch'"}, "torch"),
        ({**FACTS, "problem": "LaunchError: no interface"}, "training"),
        ({**FACTS, "backends": {**FACTS["backends"], "gloo": False}}, "gloo"),
    ],
)
def test_without_what_training_needs_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, object], name: str
) -> None:
    monkeypatch.setattr(_checks, "read_torch_facts", lambda: facts)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.output)
    assert (result.exit_code, found["can_train"]) == (1, False)
    (broken,) = [check for check in found["checks"] if check["state"] == "broken"]
    assert broken["name"] == name
    assert broken["remedy"]


def test_a_torch_that_cannot_be_loaded_is_told_and_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libgomp is missing')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(_checks.__file__).parents[2]}")
    assert _checks.read_torch_facts() == {"problem": "ImportError: libgomp is missing"}


def test_gpus_are_listed_and_a_torch_that_does_not_see_them_is_told() -> None:
    several = gpu_checks({**FACTS, "cuda": "13.0", "gpus": [GPU, GPU]}, has_driver=True)
    assert [(check.name, check.detail) for check in several] == [
        ("GPU 0", "H200, 141.0 GiB"),
        ("GPU 1", "H200, 141.0 GiB"),
    ]
    assert gpu_checks(FACTS, has_driver=False)[0].state == "unneeded"
    assert "built for CPUs only" in gpu_checks(FACTS, has_driver=True)[0].detail
    assert "nvidia-smi" in gpu_checks({**FACTS, "cuda": "13.0"}, has_driver=True)[0].remedy
    checks = by_name(torch_checks({**FACTS, "gpus": [GPU, GPU]}))
    assert checks["nccl"].state == "missing"
    assert by_name(torch_checks(FACTS))["nccl"].state == "unneeded"


def test_the_lab_says_what_it_lacks_and_what_to_do() -> None:
    assert lab_check(None).state == "ok"
    check = lab_check("The lab needs root, and this is user 1000; run it with sudo.")
    assert (check.state, check.detail, check.remedy) == (
        "missing",
        "The lab needs root, and this is user 1000",
        "run it with sudo",
    )


def test_data_sets_are_found_where_they_were_fetched(tmp_path: Path) -> None:
    before = by_name(data_checks(tmp_path))
    assert before["MNIST"].state == before["CIFAR-10"].state == "missing"
    assert before["MNIST"].remedy == f"evenly data fetch mnist --to {tmp_path}"
    assert "ImageNet" not in before
    write_images(tmp_path / "mnist")
    after = by_name(data_checks(tmp_path))["MNIST"]
    assert (after.state, after.detail) == ("ok", f"{tmp_path / 'mnist'}, 64 + 20 of 60000 + 10000")


def test_every_extra_for_users_is_checked() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"dev", "docs", "loggers"}


def test_all_checks_of_a_machine_have_names_of_their_own(tmp_path: Path) -> None:
    checks = check_machine(tmp_path, FACTS)
    assert len(by_name(checks)) == len(checks)
