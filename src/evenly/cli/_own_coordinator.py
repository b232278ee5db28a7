"""The processes of `evenly join`: the command of this node, and the coordinator if it runs here."""

import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType

import psutil

from evenly.cli.coordinate import SERVED_BY_ANOTHER
from evenly.coordination.etcd import parse_servers
from evenly.errors import LaunchError, SpecError
from evenly.launch.addresses import (
    address_text,
    address_towards,
    answers,
    is_loopback,
    is_loopback_name,
    own_addresses,
)
from evenly.launch.settings import ElasticSettings, overlay

POLL_S = 0.05
PROBE_S = 1.0  # between looks for a coordinator that another process serves here
LISTEN_S = 30.0  # within this time a coordinator that was started listens
SAY_S = 2.0  # it is said that others are waited for after this time
END_S = 5.0  # within this time a coordinator that was told to end ends
GRACE_S = 40.0  # torchrun gives its workers 30 s before it kills them
PAUSE_S = 0.5  # before a command is started again; then it doubles
MOST_PAUSE_S = 8.0

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVING = (signal.SIGUSR1,)  # by which a session saves and ends
PASSED_ON = (signal.SIGUSR2,)


class Signals:
    """The signals that this process has received; each is passed on to the command that runs."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.command: subprocess.Popen[bytes] | None = None

    @property
    def ending(self) -> int | None:
        """The first signal that ends the command, if there was one."""
        return next((number for number in self.numbers if number in ENDING), None)

    @property
    def is_last_start(self) -> bool:
        """Whether the command is not started again."""
        return any(number in (*ENDING, *SAVING) for number in self.numbers)

    def take(self, number: int, _: FrameType | None) -> None:
        """Is the handler."""
        self.numbers.append(number)
        if self.command is not None:
            with suppress(OSError):
                self.command.send_signal(number)


@contextmanager
def collected_signals() -> Iterator[Signals]:
    """Yields the signals that are received meanwhile."""
    received = Signals()
    before = {number: signal.signal(number, received.take) for number in (*ENDING, *SAVING, *PASSED_ON)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(
    command: Sequence[str],
    settings: ElasticSettings,
    *,
    restarts: int,
    received: Signals,
    watch: Callable[[], None],
) -> int:
    """Returns the exit code of `command`, which is started again up to `restarts` times if it fails."""
    pause_s, num_starts = PAUSE_S, 0
    while True:
        num_starts += 1
        start = secrets.token_hex(8)
        code = _run_once(command, replace(settings, start=start), received=received, watch=watch)
        if code:
            _end_what_is_left(start)
        if not code or received.is_last_start or num_starts > restarts:
            return code if code >= 0 else 128 - code
        print(
            f"node {settings.node} ended with {_named(code)}; it is started again ({num_starts} of {restarts})",
            file=sys.stderr,
            flush=True,
        )
        until_s = time.monotonic() + pause_s
        while time.monotonic() < until_s and not received.is_last_start:
            watch()
            time.sleep(POLL_S)
        if received.ending is not None:
            return 128 + received.ending
        pause_s = min(2 * pause_s, MOST_PAUSE_S)


def _run_once(
    command: Sequence[str], settings: ElasticSettings, *, received: Signals, watch: Callable[[], None]
) -> int:
    """Returns the exit code of one start; after a signal the command has some time to end."""
    try:  # in a group of its own: a Ctrl-C that reached it twice would cut short its ending
        process = subprocess.Popen(command, env=overlay(settings.variables()), process_group=0)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LaunchError(
            f"node {settings.node} was to run {command[0][:200]}; {reason}. Write the command after --, as in a shell."
        ) from None
    received.command = process
    ending_s: float | None = None
    try:
        if received.ending is not None:  # it came before there was a process to pass it on to
            process.send_signal(received.ending)
        while (code := process.poll()) is None:
            watch()
            time.sleep(POLL_S)
            if received.ending is not None:
                ending_s = ending_s or time.monotonic()
                if time.monotonic() - ending_s > GRACE_S:
                    process.kill()
        return code
    finally:
        received.command = None
        if process.poll() is None:
            process.kill()
            process.wait()


def _end_what_is_left(start: str) -> None:
    """Kills the processes of a start whose launcher has ended: they would hold the place of the next start."""
    left = [process for process in psutil.process_iter() if _is_of(process, start)]
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=5.0)


def _is_of(process: psutil.Process, start: str) -> bool:
    try:
        return process.environ().get("EVENLY_START") == start
    except (psutil.Error, OSError):
        return False  # it has ended, or belongs to somebody else


def _named(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"


class OwnCoordinator:
    """The coordinator as a child process: where its address is one of this machine, and always with etcd."""

    def __init__(self, settings: ElasticSettings, *, expected_nodes: int, straggler_wait_s: float) -> None:
        self._settings = settings
        self._options: tuple[str, ...] = (
            "--expected-nodes",
            str(expected_nodes),
            "--straggler-wait",
            str(straggler_wait_s),
        )
        self._process: subprocess.Popen[str] | None = None
        self._probed_s = -PROBE_S
        self._address: tuple[str, int] | None = None  # where it is to listen; None if it is on another machine
        if isinstance(settings.coordinator, str):
            self._address = _address_beside(settings.coordinator), 0
            self._options = (*self._options, "--etcd", settings.coordinator, "--job", settings.job)
        elif own := own_addresses(settings.coordinator[0]):
            self._address = own[0], settings.coordinator[1]

    def open(self) -> None:
        """Starts the coordinator if this machine should have it; raises an error that says why it cannot be."""
        if self._address is None or self._is_served():
            return
        coordinator = self._settings.coordinator
        is_named = isinstance(coordinator, tuple) and not is_loopback_name(coordinator[0])
        if is_named and is_loopback(self._address[0]):
            raise SpecError(
                f"--coordinator {address_text(coordinator)} was given; here that is a name for this machine alone "
                f"({self._address[0]}), where other nodes do not reach it. Give the IP address by which they do."
            )
        code = self._start(self._address)
        if code is not None and code != SERVED_BY_ANOTHER:
            raise LaunchError(
                f"the coordinator was to listen at {address_text(self._address)}; it ended with {_named(code)}, as its "
                "message above says. Give another port or address, the same on all nodes."
            )

    def watch(self) -> None:
        """Starts the coordinator again if it has ended, here or in another process of this machine."""
        if self._address is None or (self._process is not None and self._process.poll() is None):
            return
        is_own_gone = self._process is not None
        self.close()
        self._process = None
        if not is_own_gone and time.monotonic() - self._probed_s < PROBE_S:
            return
        self._probed_s = time.monotonic()
        if not self._is_served():
            self._start(self._address)

    def _is_served(self) -> bool:
        """Whether another process of this machine is the coordinator; with etcd every node has one of its own."""
        coordinator = self._settings.coordinator
        return isinstance(coordinator, tuple) and answers(coordinator)

    def retire(self, received: Signals) -> None:
        """Waits until the other nodes have left the coordinator that runs here, or a signal comes."""
        has_others = isinstance(self._settings.coordinator, str)  # that take over
        if self._process is None or received.ending is not None or has_others:
            return
        self._process.send_signal(signal.SIGUSR1)
        began_s, is_said = time.monotonic(), False
        while self._process.poll() is None and received.ending is None:
            time.sleep(POLL_S)
            if not is_said and time.monotonic() - began_s > SAY_S:
                is_said = True
                print("this node has ended; its coordinator serves the others until they leave", file=sys.stderr)

    def close(self) -> None:
        """Ends the coordinator that runs here."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _start(self, address: tuple[str, int]) -> int | None:
        """Returns None once the coordinator listens, or its exit code if it ends before."""
        bind = address_text(address)
        secret_file = self._settings.secret_file
        secret = () if secret_file is None else ("--secret-file", str(secret_file))
        command = (sys.executable, "-m", "evenly", "coordinate", "--bind", bind, *secret, *self._options)
        process = subprocess.Popen(
            (*command, "--parent", str(psutil.Process().pid)), stdout=subprocess.PIPE, text=True, process_group=0
        )
        line = _first_line(process)
        if not line:
            process.kill()
            if process.stdout is not None:
                process.stdout.close()
            return process.wait()
        print(line, end="", file=sys.stderr, flush=True)  # what this process prints is what the command prints
        self._process = process
        return None


def _address_beside(url: str) -> str:
    """Returns the address by which this machine reaches etcd, where other nodes reach it, too."""
    problem = ""
    for server in parse_servers(url):
        try:
            return address_towards(server)
        except OSError as error:
            problem = error.strerror or str(error)
    raise LaunchError(
        f"the coordinator was to be found by {url[:200]}; this machine has no way to a server of it ({problem}). Give "
        "addresses of etcd that all nodes reach."
    )


def _first_line(process: "subprocess.Popen[str]") -> str:
    """Returns the line that says that the coordinator listens; an empty text if it does not come."""
    if process.stdout is None or not select.select([process.stdout], [], [], LISTEN_S)[0]:
        return ""
    return process.stdout.readline()
