"""However a run ends, nothing of it is left."""

import math
import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from evenly.errors import LabError
from evenly.lab import Lab, LabCluster, LabNode, clean
from tests.lab.traces import has_text, processes, traces, wait_until

pytestmark = pytest.mark.lab

TWO = LabCluster(nodes=[LabNode(), LabNode()])

# Each rank notes that it runs, starts a child that leaves its session, and waits. A word tells these processes apart.
SLEEP = f"{sys.executable} -c 'import time; time.sleep(300)'"
LINGER = f"echo >> $0; setsid {SLEEP} $1 & exec {SLEEP} $1"
OWNER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
from evenly.cli.lab import app
app()
"""


@pytest.fixture
def word() -> str:
    """A word to know the processes of this test by."""
    return uuid.uuid4().hex


@pytest.fixture
def owner(tmp_path, word):
    """A process that runs a lab of two ranks, which both have begun to wait."""
    (tmp_path / "two.toml").write_text("nodes = [{}, {}]")
    command = [sys.executable, "-c", OWNER, "run", str(tmp_path / "two.toml"), "--", "sh", "-c", LINGER]
    words = [*command, str(tmp_path / "ready"), word]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert wait_until(lambda: has_text(tmp_path / "ready", lines=2))
    assert wait_until(lambda: len(processes(word)) == 5)  # the owner's own command has the word too
    yield process
    process.kill()
    process.communicate()
    clean()


def test_a_failing_rank_ends_the_others():
    with Lab(TWO) as lab:
        begun = time.monotonic()
        script = "if [ $RANK = 1 ]; then echo no >&2; exit 7; fi; exec sleep 300"
        result = lab.run(["sh", "-c", script], output="capture", grace_s=0.3)
    assert time.monotonic() - begun < 60
    assert result.exit_codes == (-signal.SIGTERM, 7)
    assert (result.first_failed, result.exit_code, result.ok) == (1, 7, False)
    with pytest.raises(LabError, match=r"rank 1 failed first, with exit code 7(.|\n)*no"):
        result.check()


def test_the_others_have_time_to_finish():
    with Lab(TWO) as lab:
        script = "[ $RANK = 0 ] || exit 7; sleep 0.5; echo done"
        result = lab.run(["sh", "-c", script], output="capture", grace_s=math.inf)
    assert result.exit_codes == (0, 7)
    assert result.stdout[0] == "done\n"


def test_a_rank_that_ignores_sigterm_is_killed(word):
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    with Lab(LabCluster(nodes=[LabNode()])) as lab:
        result = lab.run(
            [sys.executable, "-c", script, word], output="capture", timeout_s=4.0
        )  # enough to ignore it on a busy machine
        assert processes(word) == []
    assert result.exit_codes == (-signal.SIGKILL,)
    assert (result.timed_out, result.exit_code, result.first_failed) == (True, 124, None)
    with pytest.raises(LabError, match="ran into the timeout"):
        result.check()


def test_what_a_rank_leaves_behind_is_ended(word):
    script = f"setsid {SLEEP} {word} & sleep 0.3"
    with Lab(LabCluster(nodes=[LabNode()])) as lab:
        result = lab.run(["sh", "-c", script], output="capture").check()
        assert processes(word) == []
    assert result.wall_s < 2


def test_an_error_in_the_block_removes_the_lab():
    def build_and_fail() -> None:
        with Lab(TWO):
            assert traces(os.getpid())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_and_fail()
    assert traces(os.getpid()) == set()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_owner_leaves_nothing(owner, word, number, code):
    assert len({name.rpartition("-")[2] for name in traces(owner.pid)}) >= 3
    owner.send_signal(number)
    owner.send_signal(number)  # impatience does not disturb the tidying up
    assert owner.wait(timeout=20) == code
    assert processes(word) == []
    assert traces(owner.pid) == set()


def test_killing_the_owner_leaves_no_rank_and_the_next_lab_removes_the_rest(owner, word):
    ranks = {child.pid for child in psutil.Process(owner.pid).children()}
    assert len(ranks) == 2
    owner.kill()
    owner.wait()
    assert wait_until(lambda: not ranks & set(processes(word)))
    assert traces(owner.pid)
    with Lab(TWO):
        assert traces(owner.pid) == set()
        assert processes(word) == []


def test_cleaning_by_hand_spares_the_living(owner):
    with Lab(TWO) as lab:
        owner.kill()
        owner.wait()
        names = clean()
        assert [name for name in names if name.startswith(f"evn{owner.pid}-")]
        assert not [name for name in names if name.startswith(f"evn{os.getpid()}-")]
        assert lab.run(["true"]).ok
    assert traces(owner.pid) == set()
