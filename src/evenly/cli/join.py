"""`evenly join`: starts this machine's part of an elastic run, and starts it again if it fails."""

import socket
from pathlib import Path
from typing import Annotated

import typer

from evenly.cli.coordinate import ExpectedNodesOption, JobOption, SecretFileOption, StragglerWaitOption


def join(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What starts the ranks of this node.")],
    coordinator: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the nodes meet, the same on all; or etcd://HOST:PORT,...")
    ],
    secret_file: SecretFileOption = None,
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name of this node. Without it, that of the machine.")
    ] = None,
    job: JobOption = "evenly",
    expected_nodes: ExpectedNodesOption = 1,
    straggler_wait: StragglerWaitOption = 30.0,
    restarts: Annotated[int, typer.Option(metavar="N", help="Starts a command that fails again.", min=0)] = 3,
) -> None:
    """Join an elastic run as a node: nodes may come, go, fail and return while the others train.

    Once on every node, with the same coordinator; each has a launcher of its own:

        evenly join --coordinator 10.0.0.1:29400 --secret-file secret -- torchrun --nproc-per-node 2 train.py

    If HOST is this machine and nobody listens there, the coordinator is started, too, and started again if it ends.
    --expected-nodes and --straggler-wait are for this coordinator. It stays until the other nodes have left.

    With etcd://HOST:PORT,... every node has a coordinator, of which one serves; when it fails, another one does.
    """
    from evenly.cli._own_coordinator import OwnCoordinator, collected_signals, run_command
    from evenly.coordination.values import is_name
    from evenly.errors import SpecError
    from evenly.launch.addresses import parse_coordinator
    from evenly.launch.settings import ElasticSettings, shared_secret

    address = parse_coordinator(coordinator, source="--coordinator")
    if isinstance(address, tuple) and not address[1]:
        raise SpecError(f"--coordinator {coordinator} was given; all nodes need to know the port. Give one from 1 on.")
    name = node or socket.gethostname()
    for option, text in (("--node", name), ("--job", job)):
        if not (text and is_name(text)):
            raise SpecError(f"{option} {text[:80]!r} was given; a name has 1 to 128 printable characters. Shorten it.")
    shared_secret(secret_file)  # a file that cannot be used is said before anything starts
    settings = ElasticSettings(
        coordinator=address, node=name, start="", job=job, secret_file=secret_file and Path(secret_file).absolute()
    )
    with collected_signals() as received:
        own = OwnCoordinator(settings, expected_nodes=expected_nodes, straggler_wait_s=straggler_wait)
        try:
            own.open()
            code = run_command(command, settings, restarts=restarts, received=received, watch=own.watch)
            own.retire(received)
        finally:
            own.close()
    raise typer.Exit(code)
