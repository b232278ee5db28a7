"""`evenly plan`: the work of each rank, so that all devices finish together."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenly.cli._known_options import (
    Across,
    ClusterFile,
    Dtype,
    Flops,
    GraphFile,
    Inputs,
    Inside,
    ModelWord,
    Nodes,
    ProfileFile,
    Speeds,
)

if TYPE_CHECKING:
    from evenly.spec import Plan


def plan(
    model: ModelWord = None,
    inputs: Inputs = None,
    dtype: Dtype = None,
    cluster: ClusterFile = None,
    profile: ProfileFile = None,
    graph: GraphFile = None,
    speeds: Speeds = None,
    nodes: Nodes = None,
    flops: Flops = None,
    inside: Inside = None,
    across: Across = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples of all ranks together in a step; the example's if left out.")
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            metavar="K|30s|2%|epoch|5 epochs|adaptive|global", help="The period K'; chosen by --budget if left out."
        ),
    ] = None,
    budget: Annotated[float, typer.Option(help="Part of the time for exchanges between nodes.")] = 0.05,
    memory: Annotated[
        str | None, typer.Option(metavar="8GB,4GB,...", help="What each rank may use; else what was free.")
    ] = None,
    no_cut: Annotated[bool, typer.Option("--no-cut", help="Let no ranks hold one network together.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan as JSON to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw who computes and waits: a .png or .svg file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Plan a training step: samples and filters for every rank, who is left out, and the period K'.

    Examples: `evenly plan --cluster cluster.json --profile profile.json --graph graph.json --out plan.json`;
    `evenly plan cifar --speeds 70,25,5 --nodes 2,1 --across 1Gbit`.
    """
    from evenly.cli._documents import require_writable
    from evenly.cli._known import Options
    from evenly.cli._quantities import memories_of
    from evenly.reports import Panel, draw_picture, rank_rows, require_picture
    from evenly.spec import period_of

    require_writable(out, picture)
    if picture is not None:
        require_picture(picture)
    options = (cluster, profile, graph, speeds, nodes, flops, inside, across)
    wishes = {
        "batch_size": batch_size,
        "every": None if every is None else period_of(every),
        "cut": not no_cut,
        "exchange_budget": budget,
        "memory_bytes": None if memory is None else memories_of(memory),
    }
    described = Options(model, inputs or (), dtype, *options).load()
    from evenly.cli._show import open_console, say_doubts, show_plan
    from evenly.planner import plan as find_plan
    from evenly.planner import simulate

    best_plan = find_plan(*described, **wishes)  # type: ignore[arg-type]  # each has the type that plan names
    forecast = simulate(best_plan, *described, steps=_steps(best_plan))
    if out is not None:
        best_plan.save(out)
    if picture is not None:
        draw_picture([Panel("", rank_rows(best_plan, forecast, described[0]), forecast)], picture)
    if json:
        print(best_plan.to_json())
        return
    show_plan(best_plan, forecast, described[0], console=open_console())
    say_doubts(described[1], best_plan, console=open_console())


def _steps(plan: "Plan") -> int:
    """Returns the steps of one period; the mean step time is taken over them."""
    from evenly.spec.period import known_steps

    return known_steps(plan.period) or 1000
