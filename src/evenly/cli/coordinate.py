"""`evenly coordinate`: where the nodes of an elastic run meet."""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from evenly.coordination import Coordinator

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
_POLL_S = 0.5


def coordinate(
    bind: BindOption = "127.0.0.1:29400",
    secret_file: SecretFileOption = None,
    expected_nodes: ExpectedNodesOption = 1,
    straggler_wait: StragglerWaitOption = 30.0,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve an elastic run: its nodes agree here on who takes part in each exchange.

    It needs neither a GPU nor torch and keeps nothing on disk: after an end, start it again at the same address, and
    the nodes come back. `evenly join` on the machine that has the address starts it by itself. SIGTERM ends it.

    Example: `evenly coordinate --bind 10.0.0.1:29400 --secret-file ~/.evenly-secret --expected-nodes 3`.
    """
    from evenly.coordination import Coordinator, RoundSettings
    from evenly.errors import SpecError
    from evenly.launch.addresses import answers, parse_address
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
    host, port = coordinator.address
    print(f"coordinator listens at {f'[{host}]' if ':' in host else host}:{port}", flush=True)
    coordinator.serve()
    if signal.SIGINT in received:
        raise typer.Exit(128 + signal.SIGINT)


def _retire_with(parent: int, coordinator: "Coordinator") -> None:
    """Lets the coordinator end when nobody uses it, once the process that has started it is gone."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    coordinator.retire()
