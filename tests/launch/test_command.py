"""`evenly launch`: unequal nodes on one machine, failures and interruptions that leave nobody behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from typer.testing import CliRunner

from evenly.cli.launch import CONTEXT_SETTINGS, launch, run_together
from evenly.launch.ports import free_port
from tests.launch.greetings import greetings

SCRIPT = str(Path(__file__).with_name("greet.py"))
LINGER = str(Path(__file__).with_name("linger.py"))
START = """
import typer
from evenly.cli.launch import CONTEXT_SETTINGS, launch
app = typer.Typer()
app.command(context_settings=CONTEXT_SETTINGS)(launch)
app()
"""


def start(*words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", START, *words]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # launch gives its own
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environ, start_new_session=True, **pipes)


def gone(said: list[dict[str, Any]]) -> bool:
    return not any(psutil.pid_exists(each["pid"]) for each in said)


def help_text(*words: str) -> str:
    app = typer.Typer()
    app.command(context_settings=CONTEXT_SETTINGS)(launch)
    return CliRunner().invoke(app, words, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).output


def test_two_ranks_and_one_run_as_two_nodes() -> None:
    process = start("--nodes", "2,1", SCRIPT, "--nodes", "of the script", "--help")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    said = greetings(out)
    slots = [
        (each["place"]["rank"], each["place"]["node_id"], each["place"]["local_rank"], each["place"]["local_size"])
        for each in said
    ]
    assert slots == [(0, "0", 0, 2), (1, "0", 1, 2), (2, "1", 0, 1)]
    assert all(each["totals"] == [3, 3] for each in said)
    assert all(each["args"] == ["--nodes", "of the script", "--help"] for each in said)


def test_the_store_of_a_rehearsal_is_reached_from_this_machine_only() -> None:
    port = free_port()
    process = start("--nodes", "1", "--master", f"127.0.0.1:{port}", SCRIPT, "--stay")
    try:
        assert process.stdout is not None
        process.stdout.readline()
        socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5.0)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


SLOW_AGENT = """
import sys, time
from evenly.launch import agent
from torch.distributed.elastic.utils import store

def arrive_slowly(**options):
    last = arrive(**options)
    time.sleep(0.5)  # the others have the answer already
    return last

if "--node-rank=1" in sys.argv:
    time.sleep(2)  # this agent is the last to be done
    arrive, store._barrier_nonblocking = store._barrier_nonblocking, arrive_slowly
agent.main()
"""


def test_the_agent_of_the_first_node_serves_its_store_until_the_others_are_done(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("")
    options = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", SLOW_AGENT, *options, f"--node-rank={node}", str(script)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    said = [agent.communicate(timeout=90)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "Traceback" not in "".join(said)


def test_one_failing_rank_ends_all_nodes_and_is_the_exit_code(tmp_path: Path) -> None:
    process = start("--nodes", "1,1", LINGER, "--fail", str(tmp_path))
    out, err = process.communicate(timeout=90)
    assert process.returncode == 1, err
    assert len(greetings(out)) == 2
    assert gone(greetings(out))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_all(number: signal.Signals, code: int) -> None:
    process = start("--nodes", "1", "-m", "tests.launch.linger")
    assert process.stdout is not None
    line = process.stdout.readline()
    time.sleep(0.2)
    os.killpg(process.pid, number)  # as a terminal does: the whole foreground group
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert gone(greetings(line + out))
    assert "Traceback" not in err
    assert "node 0 on " in err
    assert f"interrupted by {signal.Signals(number).name}" in err


def test_what_does_not_listen_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["evenly.cli.launch"], "_GRACE_S", 1.0)
    deaf = f"""
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
time.sleep(100)
"""
    failing = f"""
import pathlib, sys, time
while not pathlib.Path({str(tmp_path / "pid")!r}).exists() or not pathlib.Path({str(tmp_path / "pid")!r}).read_text():
    time.sleep(0.05)
sys.exit(3)
"""
    assert run_together([[sys.executable, "-c", deaf], [sys.executable, "-c", failing]], environ={}) == 3
    child = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_second_interruption_does_not_wait_for_what_does_not_listen(tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text(
        "import os, signal, time\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(100)\n"
    )
    process = start("--nodes", "1", str(script))
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(2.0)  # the first is being answered
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - began < 15  # an agent gives its workers 30 s
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE


def test_help_says_how_to_start_a_cluster() -> None:
    text = help_text("--help")
    assert "evenly launch --nodes 3,1 --node-rank 0 --master host0:29500 train.py" in text
    assert "all nodes start on this machine" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nodes", "2,x"], "whole number from 1"),
        (["--nodes", "2,0"], "whole number from 1"),
        (["--nodes", "2,1", "--node-rank", "2", "--master", "a:1"], "Count from 0 to 1"),
        (["--nodes", "2,1", "--node-rank", "0"], "--master HOST:PORT"),
        (["--nodes", "2,1", "--master", "a:b"], "--master HOST:PORT"),
    ],
)
def test_a_wrong_option_is_answered_with_what_to_write(words: list[str], told: str) -> None:
    assert told in help_text(*words, "train.py")
