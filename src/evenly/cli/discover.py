"""`evenly discover`: which rank is on which node, with which device."""

from pathlib import Path
from typing import Annotated

import typer


def discover(
    out: Annotated[Path | None, typer.Option(help="Write the cluster as JSON to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for all ranks.")] = 300.0,
) -> None:
    """Show the cluster: every rank, its node and its device. Run it under the launcher you train with, or alone.

    Examples: `evenly discover`; `srun evenly discover`; `evenly launch --nodes 3,1 -m evenly discover`.
    """
    from rich import box
    from rich.table import Table

    from evenly.cli._show import open_console
    from evenly.session import Session
    from evenly.spec.plan import counted

    with Session(device=device, timeout_s=timeout) as session:
        if session.rank:
            return
        if out is not None:
            session.cluster.save(out)
        if json:
            print(session.cluster.to_json())
            return
        ranks, nodes = counted(session.world_size, "rank"), counted(len(session.cluster.nodes), "node")
        table = Table(title=f"{ranks} on {nodes}", box=box.SIMPLE_HEAD)
        for header in ("node", "rank", "device", "memory GiB", "cores"):
            table.add_column(header, justify="left" if header in ("node", "device") else "right")
        for node in session.cluster.nodes:
            for rank, hardware in zip(node.ranks, node.devices, strict=True):
                name = hardware.name or f"{hardware.kind}:{hardware.index}" if hardware.kind == "cuda" else "cpu"
                memory, cores = f"{hardware.memory_bytes / 2**30:.1f}", str(hardware.cores or "-")
                table.add_row(node.name, str(rank), name, memory, cores)
        open_console().print(table)
