"""A network that torch.export refuses is answered by our error alone: no graphs, no lines of torch's log."""

import logging
import subprocess
import sys

import pytest

from evenly._torch.quiet_export import quiet_export


def test_only_our_error_is_said() -> None:
    command = [sys.executable, "-m", "tests.graph.refused"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    names = [line.partition(":")[0] for line in lines[::2]]
    assert names == ["ItemBranch", "ValueBranch", "NoMetaKernel"]  # each error is one line
    assert "Could not guard on data-dependent expression" in lines[0]
    assert "such a module is computed whole on every rank." in lines[0]
    assert all(line.startswith("cause: ") and "None" not in line for line in lines[1::2])


def test_what_the_program_logs_and_prints_meanwhile_stays(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("program")
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    try:
        with quiet_export():
            logger.warning("a line of the program")
            print("a print of the program")
    finally:
        logger.removeHandler(handler)
    said = capfd.readouterr()
    assert said.err == "a line of the program\n"
    assert said.out == "a print of the program\n"


def test_torch_speaks_again_afterwards(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("torch.a_module")
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    try:
        with quiet_export():
            logger.warning("dropped")
        logger.warning("heard")
    finally:
        logger.removeHandler(handler)
    assert "dropped" not in (said := capfd.readouterr().err)
    assert "heard" in said
