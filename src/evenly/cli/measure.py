"""`evenly measure`: how fast each rank trains a network, and the links between ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenly.cli._completion import networks
from evenly.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from torch import nn

    from evenly.graph import Example
    from evenly.session import Session
    from evenly.spec import Cluster, DeviceProfile, Graph, Profile

MOST_LINKS = 20  # shown; of more, the slowest
MOST_SIZES = 4  # of a step, that are shown


def measure(
    model: Annotated[
        str,
        typer.Argument(
            autocompletion=networks,
            help="A network's name, such as cifar or resnet18; package.module:callable; file.py:callable; timm:NAME.",
        ),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NxCxHxW",
            help="Shape of a batch, samples first; repeat it for several inputs. Networks with a name have a default.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the input: float32, float64, float16, bfloat16, int64 or int32; float32 unless the network takes "
            "tokens."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the profile as JSON to this file.")] = None,
    cluster_out: Annotated[Path | None, typer.Option(help="Write the cluster as JSON to this file.")] = None,
    graph_out: Annotated[Path | None, typer.Option(help="Write the network as JSON to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="10 to 30 seconds instead of one to three minutes.")] = False,
    memory: Annotated[
        str | None, typer.Option(metavar="8GB,4GB,...", help="What plans may use of each rank; else what is free.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not use a profile that was kept before.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for all ranks.")] = 600.0,
) -> None:
    """Measure the devices and links with a network: run it under the launcher you train with, or alone.

    Examples: `evenly measure cifar --quick --out profile.json --cluster-out cluster.json --graph-out graph.json`;
    `evenly launch --nodes 2,1 -m evenly measure net.py:Net --input 64x3x32x32`.
    """
    from evenly.cli._documents import require_writable
    from evenly.cli._network import build, draw, examples
    from evenly.cli._show import open_console, say_doubts
    from evenly.session import Session

    with Session(device=device, timeout_s=timeout) as session:
        if session.rank == 0:
            require_writable(out, cluster_out, graph_out)
        limits = _limits(session, memory)
        network = build(model, inputs or (), dtype)
        batch = examples(model, inputs or (), dtype)
        graph = draw(model, network, batch)
        moved = tuple(x.to(session.device) for x in batch)
        profile, source = _profile(session, network.to(session.device), moved, graph, limits, quick, fresh, timeout)
        if session.rank:
            return
        for value, path in ((profile, out), (session.cluster, cluster_out), (graph, graph_out)):
            if path is not None:
                value.save(path)
        console = open_console()
        show_profile(profile, session.cluster, console=console)
        say_doubts(profile, console=console)
        print(source)


def _limits(session: Session, memory: str | None) -> list[int] | None:
    """Returns the memory limit of each rank, as given on rank 0; None without limits."""
    from evenly.cli._quantities import memories_of
    from evenly.spec.plan import counted

    ranks = session.world_size
    limits: list[int] = []
    if memory is not None and session.rank == 0:
        limits = memories_of(memory)
        if len(limits) != ranks:
            raise SpecError(f"--memory {memory} was given for {counted(ranks, 'rank')}. Write one size for each.")
    sums = session.sum(*(limits or [0] * ranks))
    return [int(size) for size in sums] if any(sums) else None


def _profile(
    session: Session,
    network: nn.Module,
    batch: Example,
    graph: Graph,
    limits: list[int] | None,
    quick: bool,
    fresh: bool,
    timeout_s: float,
) -> tuple[Profile, str]:
    """Returns the profile, cached or measured, and a sentence on its source; rank 0 decides for all."""
    from evenly.cli._profiles import ProfileCache
    from evenly.cli._show import open_console
    from evenly.session import measure as measure_all

    cache = ProfileCache(session.cluster, graph, limits=limits, quick=quick)
    cached = cache.find() if session.rank == 0 and not fresh else None
    if session.sum(cached is not None)[0]:
        return cached or _placeholder(
            session, graph
        ), f"kept from an earlier time in {cache.path}; --fresh measures anew"
    with progress(quick, console=open_console(stderr=True) if session.rank == 0 else None) as tell:
        mine = None if limits is None else limits[session.rank]
        profile = measure_all(network, batch, quick=quick, memory_bytes=mine, tell=tell, timeout_s=timeout_s)
    if session.rank == 0 and not cache.keep(profile):
        return profile, f"measured now; not kept, because {cache.path.parent} cannot be written to"
    return profile, f"measured now, and kept in {cache.path}"


def _placeholder(session: Session, graph: Graph) -> Profile:
    """Returns a placeholder profile for ranks that print nothing."""
    from evenly.spec import Profile

    return Profile.from_speeds(session.cluster, graph, [1.0] * session.world_size)


@contextmanager
def progress(quick: bool, *, console: Console | None) -> Iterator[Callable[[str], None] | None]:
    """Shows what is measured now: a bar on a terminal, else a line from time to time."""
    if console is None:
        yield None
        return
    if not console.is_terminal:
        yield _Lines(console).tell
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from evenly.survey.measure import QUICK_S, THOROUGH_S

    total, began = QUICK_S if quick else THOROUGH_S, time.monotonic()
    columns = (BarColumn(bar_width=30), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def tell(text: str) -> None:
            bar.update(task, completed=min(time.monotonic() - began, total), description=text[:60])

        yield tell


class _Lines:
    """Prints progress at most every `LINE_S` seconds."""

    def __init__(self, console: Console) -> None:
        self._console, self._printed_at = console, 0.0

    def tell(self, text: str) -> None:
        from evenly.cli.console import LINE_S

        if time.monotonic() - self._printed_at > LINE_S:
            self._printed_at = time.monotonic()
            self._console.print(f"measuring: {text}", markup=False, soft_wrap=True)


def show_profile(profile: Profile, cluster: Cluster, *, console: Console) -> None:
    """Prints what every rank needs for a step, and the links between ranks."""
    from rich.markup import escape

    from evenly.cli._show import say, table_of

    sizes = sorted({size for device in profile.devices for size in device.step.sizes})
    shown = _spaced(sizes, MOST_SIZES)
    headers = ("rank", "device", *(f"{size}: ms" for size in shown), "samples/s", "spread", "free")
    table = table_of(headers, left=2)
    for device in profile.devices:
        table.add_row(*map(escape, _cells(device, cluster, shown)))
    say([f"a training step with {', '.join(map(str, sizes))} samples"], console)
    console.print(table)
    _show_links(profile, console)


def _spaced(values: Sequence[int], most: int) -> list[int]:
    """Returns the first, the last, and evenly spaced ones between them, at most `most` in all."""
    intervals = min(most, len(values)) - 1
    return (
        [values[round(index * (len(values) - 1) / intervals)] for index in range(intervals + 1)]
        if intervals
        else list(values)
    )


def _cells(device: DeviceProfile, cluster: Cluster, sizes: Sequence[int]) -> Iterator[str]:
    from evenly.reports import gigabytes, milliseconds, per_second

    seconds_by_size = dict(zip(device.step.sizes, device.step.seconds, strict=True))
    rank_device = cluster.device_of(device.rank)
    most = max(seconds_by_size)
    yield from (
        str(device.rank),
        rank_device.name or (f"cuda:{rank_device.index}" if rank_device.kind == "cuda" else "cpu"),
    )
    yield from (milliseconds(seconds_by_size[size]) if size in seconds_by_size else "-" for size in sizes)
    yield from (
        per_second(most / seconds_by_size[most]),
        "-" if device.spread is None else f"{device.spread:.1%}",
        gigabytes(device.free_bytes),
    )


def _show_links(profile: Profile, console: Console) -> None:
    from evenly.cli._show import say, table_of
    from evenly.reports import milliseconds
    from evenly.spec.plan import counted

    links = sorted(profile.lanes, key=lambda link: link.rate.bytes_per_s)[:MOST_LINKS]
    if not links:
        return
    table = table_of(("from", "to", "latency ms", "MB/s"), left=0)
    for link in sorted(links, key=lambda link: (link.source, link.target)):
        rate = link.rate
        table.add_row(str(link.source), str(link.target), milliseconds(rate.latency_s), f"{rate.bytes_per_s / 1e6:.4g}")
    console.print(table)
    if len(profile.lanes) > MOST_LINKS:
        say([f"and {counted(len(profile.lanes) - MOST_LINKS, 'faster link')}; --out has them all"], console)
