"""`evenly coordinate` and `evenly join` as they are started by people: processes on this machine."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from evenly.cli import app
from evenly.coordination import CoordinationClient, CoordinatorSeat, MemberRank
from evenly.errors import LaunchError, SpecError
from evenly.launch.addresses import answers
from evenly.launch.ports import free_port
from tests.coordination.etcds import etcd_server

EVENLY = (sys.executable, "-m", "evenly")
TELL = "import os; print(*(os.environ.get(f'EVENLY_{name}') for name in ('COORDINATOR', 'NODE', 'JOB', 'SECRET_FILE')))"
FAILS_TWICE = """
import os, pathlib, sys
starts = pathlib.Path(sys.argv[1])
starts.write_text(starts.read_text() + os.environ['EVENLY_START'] + '\\n')
sys.exit(0 if len(starts.read_text().split()) == 3 else 7)
"""
STAYS = "import time; print('here', flush=True); time.sleep(30)"
LEAVES_A_CHILD = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)
print(child.pid, flush=True)
os._exit(3)
"""


def children_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        return []


@contextmanager
def started(*words: str) -> Iterator["subprocess.Popen[str]"]:
    """Starts a verb; kills what is left of it."""
    process = subprocess.Popen((*EVENLY, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        for each in children_of(process):
            with suppress(psutil.Error):
                each.kill()
        process.kill()
        process.communicate()


def joined(port: int, *words: str) -> tuple[str, ...]:
    return ("join", "--coordinator", f"127.0.0.1:{port}", *words)


def child_with(process: "subprocess.Popen[str]", word: str, *, besides: int = 0) -> psutil.Process:
    """Returns a child process whose command line has this word."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        for child in psutil.Process(process.pid).children():
            if child.pid != besides and child.status() != psutil.STATUS_ZOMBIE and word in child.cmdline():
                return child
        time.sleep(0.02)
    raise AssertionError(f"no child with {word}")


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 20.0
    while not answers(("127.0.0.1", port)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_coordinator_says_where_it_listens_and_ends_with_sigterm(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    with started("coordinate", "--bind", "127.0.0.1:0", "--secret-file", str(secret)) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = ("127.0.0.1", int(line.rpartition(":")[2]))
        client = CoordinationClient(address, MemberRank("a", "s", 0, 1), secret=b"0123456789abcdef")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, "", "")
        client.close()


def test_starts_without_torch() -> None:
    code = "import sys; from typer.testing import CliRunner; from evenly.cli import app, _own_coordinator, join\n"
    code += "for verb in ('coordinate', 'join'): assert CliRunner().invoke(app, [verb, '--help']).exit_code == 0\n"
    code += "assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_command_gets_its_place_and_its_output_is_all_there_is(tmp_path: Path) -> None:
    secret, port = tmp_path / "secret", free_port()
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    words = joined(port, "--node", "box 1", "--job", "run", "--secret-file", str(secret))
    with started(*words, "--", sys.executable, "-c", TELL) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, f"127.0.0.1:{port} box 1 run {secret}\n")
    assert err == f"coordinator listens at 127.0.0.1:{port}\n"
    assert not answers(("127.0.0.1", port))


def test_a_command_that_fails_is_started_again_as_another_start(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.write_text("")
    command = (sys.executable, "-c", FAILS_TWICE, str(starts))
    with started(*joined(free_port(), "--node", "a"), "--", *command) as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert len(set(starts.read_text().split())) == 3
    assert "node a ended with exit code 7; it is started again (1 of 3)" in err
    starts.write_text("")
    with started(*joined(free_port(), "--restarts", "0"), "--", *command) as process:
        process.communicate(timeout=30)
    assert process.returncode == 7


def test_a_signal_ends_the_command_and_all_else() -> None:
    port = free_port()
    with started(*joined(port), "--", sys.executable, "-c", STAYS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "started again" not in err
    assert not answers(("127.0.0.1", port))


def test_what_a_failed_command_has_left_is_ended() -> None:
    with started(*joined(free_port(), "--restarts", "0"), "--", sys.executable, "-c", LEAVES_A_CHILD) as process:
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 3
    assert not psutil.pid_exists(int(out)) or psutil.Process(int(out)).status() == psutil.STATUS_ZOMBIE


def test_a_coordinator_that_dies_is_started_again_on_its_port() -> None:
    port = free_port()
    with started(*joined(port), "--", sys.executable, "-c", STAYS) as process:
        first = child_with(process, "coordinate")
        wait_for(port)
        client = CoordinationClient(("127.0.0.1", port), MemberRank("b", "s", 0, 1))
        first.kill()
        second = child_with(process, "coordinate", besides=first.pid)
        assert second.pid != first.pid
        deadline = time.monotonic() + 20.0
        while client.is_connected or not answers(("127.0.0.1", port)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        while not client.is_connected:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        client.leave()


def test_a_coordinator_serves_until_the_others_have_left() -> None:
    port = free_port()
    with started(*joined(port), "--", sys.executable, "-c", "import time; time.sleep(2)") as process:
        wait_for(port)
        client = CoordinationClient(("127.0.0.1", port), MemberRank("b", "s", 0, 1), job="evenly")
        time.sleep(3.0)
        assert process.poll() is None
        assert client.is_connected
        client.leave()
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err


def test_a_coordinator_ends_after_its_parent_was_killed() -> None:
    port = free_port()
    with started(*joined(port), "--", sys.executable, "-c", STAYS) as process:
        coordinator = child_with(process, "coordinate")
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        others = [child for child in children_of(process) if child != coordinator]
        process.kill()
        process.wait()
        for each in others:
            each.kill()
        psutil.wait_procs([coordinator], timeout=10.0)
        assert not coordinator.is_running()


def test_two_nodes_of_one_machine_have_one_coordinator() -> None:
    port = free_port()
    words = (sys.executable, "-c", STAYS)
    with (
        started(*joined(port, "--node", "a"), "--", *words) as one,
        started(*joined(port, "--node", "b"), "--", *words) as other,
    ):
        for process in (one, other):
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
        children = [child for process in (one, other) for child in psutil.Process(process.pid).children()]
        assert sum("coordinate" in child.cmdline() for child in children) == 1


def test_with_etcd_another_coordinator_takes_over(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as etcd:
        words = ("join", "--coordinator", etcd.url, "--job", "run", "--node")
        command = ("--", sys.executable, "-c", STAYS)
        with started(*words, "a", *command) as one, started(*words, "b", *command) as other:
            children = [child_with(process, "coordinate") for process in (one, other)]
            client = CoordinationClient(etcd.url, MemberRank("c", "s", 0, 1), job="run", connect_timeout_s=20.0)
            first = CoordinatorSeat(etcd.url, job="run").find()
            serving = [child for child in children if first[1] in {each.laddr.port for each in child.net_connections()}]
            assert len(serving) == 1
            serving[0].kill()
            deadline = time.monotonic() + 20.0
            while client.is_connected or not has_moved(etcd.url, first):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            while not client.is_connected:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            client.close()


def has_moved(url: str, first: tuple[str, int]) -> bool:
    with suppress(OSError):
        return CoordinatorSeat(url, job="run").find() != first
    return False


@pytest.mark.parametrize(
    ("words", "error", "reason"),
    [
        (("--coordinator", "nowhere"), SpecError, "--coordinator nowhere was given"),
        (("--coordinator", "127.0.0.1:0"), SpecError, "port"),
        (("--coordinator", "192.0.2.1:1", "--node", "x" * 200), SpecError, "--node"),
        (("--coordinator", "192.0.2.1:1", "--job", "a\nb"), SpecError, "--job"),
        (("--coordinator", "192.0.2.1:1", "--secret-file", "/nothing"), SpecError, "No such file"),
        (("--coordinator", "192.0.2.1:1"), LaunchError, "no-such-command"),
    ],
)
def test_bad_wishes_are_refused(words: tuple[str, ...], error: type[Exception], reason: str) -> None:
    result = CliRunner().invoke(app, ["join", *words, "--", "no-such-command"])
    assert isinstance(result.exception, error)
    assert reason in str(result.exception)


def test_other_machines_are_not_served_without_a_secret() -> None:
    result = CliRunner().invoke(app, ["coordinate", "--bind", "0.0.0.0:0"])
    assert isinstance(result.exception, SpecError)
    assert "--secret-file" in str(result.exception)
