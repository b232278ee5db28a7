"""Output of ranks that goes to a file has no escape codes and no progress bars, whatever the launcher sets up."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evenly.launch.terminal import is_terminal
from tests.launch.test_world import MPIRUN

SPEAK = str(Path(__file__).with_name("speak.py"))
WISHES = {"FORCE_COLOR": "1", "PY_COLORS": "1", "TERM": "xterm-256color", "CLICOLOR_FORCE": "1"}


def require_plain(said: bytes) -> None:
    assert b"\x1b" not in said
    assert not re.search(rb"\r(?!\n)", said), "a bar is drawn again and again in one line"


@pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun on PATH or beside this Python")
def test_ranks_of_mpirun_write_plain_text_into_a_file(tmp_path: Path) -> None:
    environ = {**os.environ, **WISHES, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        done = subprocess.run(
            [str(MPIRUN), "-n", "2", sys.executable, SPEAK], env=environ, stdout=out, stderr=err, timeout=110
        )
    said, told = (tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes()
    assert done.returncode == 0, told
    assert b"Usage:" in said
    assert b"2 ranks on 1 node" in said
    assert b"--no-option" in told
    assert b"epoch 2/2: 8 steps" in told
    require_plain(said)
    require_plain(told)


@pytest.mark.parametrize("variables", [WISHES, {**WISHES, "NO_COLOR": "1"}])
@pytest.mark.parametrize("words", [["plan", "--help"], ["plan", "--no-option"]])
def test_a_pipe_gets_plain_text(variables: dict[str, str], words: list[str]) -> None:
    command = [sys.executable, "-m", "evenly", *words]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, timeout=60)
    assert b"plan" in done.stdout + done.stderr
    require_plain(done.stdout + done.stderr)


def test_a_terminal_of_mpirun_is_none() -> None:
    leader, follower = pty.openpty()
    try:
        with open(follower, "w", closefd=False) as stream:
            assert is_terminal(stream, {})
            assert is_terminal(stream, {"RANK": "0", "WORLD_SIZE": "2"})  # torchrun's ranks write to it themselves
            assert not is_terminal(stream, {"OMPI_COMM_WORLD_RANK": "0"})
            assert not is_terminal(stream, {"OMPI_COMM_WORLD_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"})
            assert not is_terminal(stream, {"PMI_RANK": "0", "PMI_SIZE": "2"})
    finally:
        os.close(leader)
        os.close(follower)
    assert not is_terminal(io.StringIO(), {})
