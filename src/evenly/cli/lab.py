"""`evenly lab`: emulate an uneven cluster on one Linux machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from evenly.cli._completion import clusters
from evenly.errors import EvenlyError

if TYPE_CHECKING:
    from evenly.lab import LabCluster, LabResult

app = typer.Typer(
    no_args_is_help=True,
    help="Emulate an uneven cluster on one Linux machine: a namespace and hostname per node, shaped links, CPU quotas.",
)


@app.command("run")
def run_command(
    cluster: Annotated[str, typer.Argument(autocompletion=clusters, help="TOML file or name of a shipped cluster.")],
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after --.")],
    output: Annotated[
        Literal["prefix", "rank0"],
        typer.Option(help="prefix: every rank's lines after its name. rank0: rank 0 only, as it is."),
    ] = "prefix",
    timeout: Annotated[float | None, typer.Option(min=0.0, help="End everything after so many seconds.")] = None,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds the other ranks may go on after one has failed; inf for no end.")
    ] = 10.0,
    json: Annotated[Path | None, typer.Option(help="Write exit codes, seconds and bytes to this file.")] = None,
) -> None:
    """Run COMMAND once per rank on the emulated nodes of CLUSTER, and print the bytes each node sent and received.

    CLUSTER is a TOML file, or the name of one that comes with evenly: demo, three-one, two-by-two. Each node has a name
    (its hostname), ranks, a rate both ways, and per rank so many cores' worth of CPU time (one number for all ranks or
    one for each) on a set of cores. What is left out is not limited.

        nodes = [
          { name = "big", ranks = 2, rate_mbit = 100, cpu = [0.8, 0.4] },
          { name = "small", ranks = 1, rate_mbit = 100, cpu = 0.2, cores = "0-1" },
        ]

    Every rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the rest of what torchrun sets in its environment.
    The exit code is that of the first rank that failed, 124 after a timeout.

    Example: evenly lab run demo -- python train.py --epochs 2
    """
    from evenly.lab import Lab, load_cluster

    with _errors_to_exit_codes():
        described = load_cluster(cluster)
        with Lab(described) as lab:
            result = lab.run(command, output=output, timeout_s=timeout, grace_s=grace)
        _show(described, result=result)
        if json is not None:
            result.save(json)
    raise typer.Exit(result.exit_code)


@app.command("check")
def check_machine() -> None:
    """Say what this machine lacks for a lab, or "ready"."""
    from evenly.lab import missing

    lack = missing()
    typer.echo("ready" if lack is None else lack)
    raise typer.Exit(0 if lack is None else 1)


@app.command("clean")
def clean_up() -> None:
    """Remove what labs left behind whose owner was killed."""
    from evenly.lab import clean

    with _errors_to_exit_codes():
        removed = clean()
    typer.echo("\n".join(f"removed {name}" for name in removed) or "nothing was left behind")


@contextmanager
def _errors_to_exit_codes() -> Iterator[None]:
    try:
        yield
    except EvenlyError as error:
        typer.echo(f"evenly lab: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _show(cluster: LabCluster, *, result: LabResult) -> None:
    # To standard error: standard output belongs to the ranks, and a script may read its last line.
    from rich.table import Table

    from evenly.cli._show import open_console

    table = Table("node", "ranks", "rate Mbit/s", "sent MB", "received MB", "exit codes")
    start = 0
    for index, node in enumerate(cluster.nodes):
        codes = result.exit_codes[start : start + node.ranks]
        rate = "unshaped" if node.rate_mbit is None else f"{node.rate_mbit:g}"
        sent, received = result.sent_bytes[index] / 1e6, result.received_bytes[index] / 1e6
        table.add_row(node.name, str(node.ranks), rate, f"{sent:.3f}", f"{received:.3f}", " ".join(map(str, codes)))
        start += node.ranks
    console = open_console(stderr=True)
    console.print(table)
    console.print(f"{result.wall_s:.1f} s" + ("" if result.ok else f"; {result.blame()}"))
