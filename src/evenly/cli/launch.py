"""`evenly launch`: torchrun on nodes with unequal numbers of processes, or all of them on one machine."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from evenly.errors import LaunchError
from evenly.launch.binding import TOGETHER, require_binding
from evenly.launch.devices import VARIABLE, parse_devices, wrong_count
from evenly.launch.ports import free_port
from evenly.launch.settings import environment, overlay
from evenly.launch.threads import thread_variables

if TYPE_CHECKING:
    import psutil

CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""Typer settings of the command: every word after SCRIPT belongs to the script."""

BOUND = "evenly.launch.bound"
"""The module that binds a rank to its cores and then becomes its program."""

_GRACE_S = 40.0  # an agent gives its workers 30 s before it kills them
_SAME_CTRL_C_S = 1.0  # two Ctrl-C within this time count as one
_KILLED_S = 5.0  # killed processes should be gone after this time
_POLL_S = 0.1


def launch(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT", help="The script and its arguments.")],
    nodes: Annotated[str, typer.Option(metavar="N,N,...", help="Processes on each node: `3,1` is two nodes.")] = "1",
    node_rank: Annotated[
        int | None, typer.Option(help="Start only this node, counted from 0. Without it, all start on this machine.")
    ] = None,
    master: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the nodes meet: a free port of node 0.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="cuda:0,cpu,...",
            help="The device of each rank that is started here, or of all ranks, in their order; gpu:0 and cpu:0 too.",
        ),
    ] = None,
    bind: Annotated[
        bool, typer.Option("--bind", help="Bind every rank to cores of its own; with more ranks than cores, in turn.")
    ] = False,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in `python -m`.")] = False,
) -> None:
    """Start a script on nodes with unequal numbers of processes.

    On a cluster, once per node, with the same list and master everywhere:

        evenly launch --nodes 3,1 --node-rank 0 --master host0:29500 train.py

    Without --node-rank all nodes start on this machine; the library treats them as separate nodes.

    Two GPUs and the CPU of this machine, as one node:

        evenly launch --nodes 3 --devices cuda:0,cuda:1,cpu train.py

    Two CPU ranks, each on half of the cores:

        evenly launch --nodes 2 --bind train.py
    """
    counts = _parse_nodes(nodes)
    host, port = _parse_master(master, node_rank=node_rank, num_nodes=len(counts))
    chosen = range(len(counts)) if node_rank is None else [_check_node(node_rank, num_nodes=len(counts))]
    device_variables = {} if devices is None else _device_variables(devices, counts, chosen)
    _require_script(command[0], is_module=module)
    program = [*(["-m"] if module else []), *command]
    if bind:
        require_binding()
        program = ["-m", BOUND, *(["--threads"] if environment("OMP_NUM_THREADS") is None else []), *program]
    commands = [_agent(counts, node=node, host=host, port=port, program=program) for node in chosen]
    # torchrun gives one thread to each of several ranks, but all cores to the only rank of a node.
    together = {**thread_variables(sum(counts)), "EVENLY_TOKEN": secrets.token_hex(16), TOGETHER: "1"}
    shared = together if node_rank is None else {}
    raise typer.Exit(run_together(commands, environ={**shared, **device_variables}))


def run_together(commands: Sequence[Sequence[str]], *, environ: Mapping[str, str]) -> int:
    """Returns the first exit code that is not 0, once all commands have ended; one failure ends the others."""
    with _collect_signals() as signals:
        # In groups of their own: a Ctrl-C that reached an agent twice would cut short its ending of the workers.
        agents = [subprocess.Popen(command, env=overlay(environ), process_group=0) for command in commands]
        try:
            with _passing_on(signal.SIGUSR1, agents):
                return _first_failure(agents, signals)
        finally:
            _end(agents, signals)
            if signals:
                name = signal.Signals(signals[0]).name
                typer.echo(
                    f"interrupted by {name}; a session that saves checkpoints resumes with the same command", err=True
                )


def _first_failure(agents: Sequence[subprocess.Popen[bytes]], signals: Sequence[int]) -> int:
    while not signals:
        codes = [agent.poll() for agent in agents]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(_POLL_S)
    return 128 + signals[0]


def _end(agents: Sequence[subprocess.Popen[bytes]], signals: Sequence[int]) -> None:
    """Terminates running agents, waits, and kills those that do not end, with all their child processes.

    A second Ctrl-C ends the waiting. Wrappers may send one Ctrl-C twice, so those of the first second count as one.
    """
    import psutil

    started = {agent.pid: _started_by(agent) for agent in agents}
    for agent in agents:
        if agent.poll() is None:
            agent.terminate()
    began, interrupts = time.monotonic(), 0
    while any(agent.poll() is None for agent in agents) and time.monotonic() < began + _GRACE_S:
        if time.monotonic() < began + _SAME_CTRL_C_S:
            interrupts = signals.count(signal.SIGINT)
        elif signals.count(signal.SIGINT) > interrupts:
            break
        time.sleep(_POLL_S)
    unresponsive = [agent for agent in agents if agent.poll() is None]
    killed = {process for agent in unresponsive for process in (*started[agent.pid], *_started_by(agent))}
    for process in killed:
        with suppress(psutil.Error):
            process.kill()
    for agent in unresponsive:
        agent.kill()
        agent.wait()
    deadline = time.monotonic() + _KILLED_S
    while not all(map(_is_gone, killed)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _started_by(agent: subprocess.Popen[bytes]) -> list[psutil.Process]:
    import psutil

    try:
        return psutil.Process(agent.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _is_gone(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def _passing_on(number: signal.Signals, agents: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Sends this signal on to the agents, whose sessions save and end."""

    def send(signum: int, _: FrameType | None) -> None:
        for agent in agents:
            agent.send_signal(signum)

    before = signal.signal(number, send)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Collects termination signals; an exception raised in a handler could be swallowed by the code it interrupts."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda signum, _: received.append(signum)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _agent(counts: Sequence[int], *, node: int, host: str, port: int, program: Sequence[str]) -> list[str]:
    """Returns torchrun's command line; only its static rendezvous keeps the order of the nodes."""
    is_module = program[0] == "-m"
    script = ["-m", "--", *program[1:]] if is_module else ["--", *program]  # else torchrun would parse its options
    return [
        *(sys.executable, "-m", "evenly.launch.agent"),
        *(f"--nnodes={len(counts)}", f"--nproc-per-node={counts[node]}", f"--node-rank={node}"),
        *(f"--master-addr={host}", f"--master-port={port}"),
        *script,
    ]


def _device_variables(text: str, counts: Sequence[int], chosen: Sequence[int]) -> dict[str, str]:
    """Returns the variable that names the device of each rank, once all that start here are known to exist."""
    from evenly.cli._devices import OPTION, as_bad_parameter, require_devices, shared_in_list

    first, num_here = sum(counts[: chosen[0]]), sum(counts[node] for node in chosen)
    with as_bad_parameter():
        devices = parse_devices(text, source=OPTION)
        if len(devices) not in (num_here, sum(counts)):
            local_size, world_size = num_here, sum(counts)
            raise LaunchError(wrong_count(devices, local_size=local_size, world_size=world_size, source=OPTION))
        here = devices if len(devices) == num_here else devices[first : first + num_here]
        require_devices(here, source=f"{OPTION} {text[:200]}")
    for line in shared_in_list(here, first_rank=first):
        typer.echo(f"evenly: {line}", err=True)
    return {VARIABLE: ",".join(devices)}


def _parse_nodes(text: str) -> list[int]:
    items = [item.strip() for item in text.split(",")]
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,3}", item) for item in items):
        raise typer.BadParameter(
            f"{text[:80]!r} was given; each node needs a whole number from 1 to 9999. Write --nodes 3,1 for three and "
            "one."
        )
    return [int(item) for item in items]


def _require_script(name: str, *, is_module: bool) -> None:
    """Raises `LaunchError` for a script or module that does not exist, once instead of on every rank."""
    is_there = False
    if is_module:
        top = name.partition(".")[0]
        spec = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])  # `python -m` looks into this folder too
        is_there = spec is not None or top in sys.builtin_module_names
        case = f"there is no module {top} in this folder or in this Python"
    else:
        with suppress(OSError, ValueError):  # a name that no file can have
            is_there = Path(name).exists()
        case = f"there is no such file in {Path.cwd()}"
    if not is_there:
        raise LaunchError(
            f"{'the module' if is_module else 'the script'} {name[:200]} was to be started; {case}. Check the name"
            f"{'' if is_module else ', or write -m for a module'}."
        )


def _check_node(node_rank: int, *, num_nodes: int) -> int:
    if not 0 <= node_rank < num_nodes:
        raise typer.BadParameter(
            f"--node-rank {node_rank} was given; --nodes lists {num_nodes}. Count from 0 to {num_nodes - 1}."
        )
    return node_rank


def _parse_master(master: str | None, *, node_rank: int | None, num_nodes: int) -> tuple[str, int]:
    if master is None and (node_rank is None or num_nodes == 1):
        return "127.0.0.1", free_port()
    host, _, port = (master or "").rpartition(":")
    if not (host and re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise typer.BadParameter(
            f"--master {(master or '(nothing)')[:80]} was given; the nodes need an address to meet. "
            "Write --master HOST:PORT with the host of node 0, the same on every node."
        )
    return host, int(port)
