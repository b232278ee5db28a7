"""`evenly coordinate`: where the nodes of an elastic run meet."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from evenly.coordination import Coordinator, CoordinatorSeat

BindOption = Annotated[str, typer.Option("--bind", metavar="HOST:PORT", help="Where to listen; port 0: a free one.")]
SecretFileOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="What all nodes share; a file of mode 0600. Or the variable EVENLY_SECRET."),
]
ExpectedNodesOption = Annotated[
    int, typer.Option(metavar="N", help="Nodes that begin a run; others join it later.", min=1)
]
StragglerWaitOption = Annotated[
    float, typer.Option(metavar="S", help="Seconds to wait for a slow node before an exchange without it.", min=0.0)
]
SERVED_BY_ANOTHER = 75  # the exit code that asks to try again
JobOption = Annotated[str, typer.Option(metavar="NAME", help="The name of the run, the same on all nodes.")]
_POLL_S = 0.5


def coordinate(
    bind: BindOption = "127.0.0.1:29400",
    secret_file: SecretFileOption = None,
    expected_nodes: ExpectedNodesOption = 1,
    straggler_wait: StragglerWaitOption = 30.0,
    etcd: Annotated[
        str | None, typer.Option(metavar="etcd://HOST:PORT,...", help="Serve only while etcd says that this one does.")
    ] = None,
    job: JobOption = "evenly",
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve an elastic run: its nodes agree here on who takes part in each exchange.

    It needs neither a GPU nor torch and keeps nothing on disk: after an end, start it again at the same address, and
    the nodes come back. `evenly join` on the machine that has the address starts it by itself. SIGTERM ends it.

    With --etcd several may run, of which one serves; another one takes over when it fails.

    Example: `evenly coordinate --bind 10.0.0.1:29400 --secret-file ~/.evenly-secret --expected-nodes 3`.
    """
    from evenly.coordination import Coordinator, CoordinatorSeat, RoundSettings
    from evenly.errors import SpecError
    from evenly.launch.addresses import address_text, answers, parse_address
    from evenly.launch.settings import shared_secret

    address, secret = parse_address(bind, source="--bind"), shared_secret(secret_file)
    settings = RoundSettings(expected_nodes=expected_nodes, straggler_wait_s=straggler_wait)
    try:
        coordinator = Coordinator(address, secret=secret, settings=settings)
    except SpecError:
        if parent is not None and answers(address):  # another node of this machine was faster
            raise typer.Exit(SERVED_BY_ANOTHER) from None
        raise
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        coordinator.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    signal.signal(signal.SIGUSR1, lambda _number, _frame: coordinator.retire())
    if parent is not None:
        threading.Thread(target=_retire_with, args=(parent, coordinator), daemon=True).start()
    print(f"coordinator listens at {address_text(coordinator.address)}", flush=True)
    if etcd is None:
        coordinator.serve()
    else:
        _serve_in_turn(coordinator, CoordinatorSeat(etcd, job=job), lambda: bool(received) or coordinator.is_retiring)
    if signal.SIGINT in received:
        raise typer.Exit(128 + signal.SIGINT)


def _serve_in_turn(coordinator: "Coordinator", seat: "CoordinatorSeat", is_over: Callable[[], bool]) -> None:
    """Serves as soon as no other candidate does, and until etcd may let another one do so."""
    from evenly.coordination.etcd import CAMPAIGN_S, SeatKeeper

    is_taken = False
    while not is_taken:
        if is_over():
            return
        with suppress(OSError):  # etcd does not answer at the moment
            is_taken = seat.take(coordinator.address)
        time.sleep(0.0 if is_taken else CAMPAIGN_S)
    keeper = SeatKeeper(seat)
    try:
        coordinator.serve(is_allowed=lambda: seat.is_held)
    finally:
        keeper.close()


def _retire_with(parent: int, coordinator: "Coordinator") -> None:
    """Lets the coordinator end when nobody uses it, once the process that has started it is gone."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    coordinator.retire()
