"""`evenly simulate`: what a plan takes, and what it would take on a changed cluster."""

from dataclasses import dataclass, field
from math import ceil, lcm
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from evenly.cli._documents import read, require_writable
from evenly.cli._edits import plan_anew, require_samples, settled, with_device, with_link, with_period, with_slow
from evenly.cli._known import (
    Across,
    ClusterFile,
    Dtype,
    Flops,
    GraphFile,
    Inputs,
    Inside,
    ModelWord,
    Nodes,
    Options,
    ProfileFile,
    Speeds,
)
from evenly.reports import Panel, draw_picture, rank_rows, require_picture
from evenly.spec import Cluster, Forecast, Graph, Plan, Profile
from evenly.spec.period import known_steps
from evenly.spec.plan import counted

LEAST_PLAYED, MOST_PLAYED = 1000, 10**6  # steps, if nobody says how many


def simulate(
    plan: Annotated[Path, typer.Option(help="The plan, from evenly plan.")],
    model: ModelWord = None,
    inputs: Inputs = None,
    dtype: Dtype = "float32",
    cluster: ClusterFile = None,
    profile: ProfileFile = None,
    graph: GraphFile = None,
    speeds: Speeds = None,
    nodes: Nodes = None,
    flops: Flops = None,
    inside: Inside = None,
    across: Across = None,
    steps: Annotated[
        int | None, typer.Option(help="How many steps to play; in whole periods, 1000 or more, if left out.")
    ] = None,
    jitter: Annotated[float, typer.Option(help="How much a rank's time varies: deviation over mean.")] = 0.0,
    period: Annotated[
        str | None, typer.Option(metavar="K|30s|2%|epoch|adaptive|global", help="What if: another period K'.")
    ] = None,
    link: Annotated[float | None, typer.Option(help="What if: so many times the bandwidth between nodes.")] = None,
    slow: Annotated[
        list[str] | None, typer.Option(metavar="RANK=FACTOR", help="What if: a rank of so many times its speed.")
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE[:like RANK]", help="What if: a device more; then it is planned anew."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the (changed) forecast as JSON to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw who computes and waits: a .png or .svg file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Play a plan through, and with what-if options a changed one beside it. Nothing runs; no torch is needed.

    Examples: `evenly simulate --plan plan.json --cluster cluster.json --profile profile.json --graph graph.json`;
    the same with `--link 0.5`, `--slow 2=0.25`, `--period 200` or `--add 1:like 0`.
    """
    require_writable(out, picture)
    if picture is not None:
        require_picture(picture)
    options = (cluster, profile, graph, speeds, nodes, flops, inside, across)
    known = Options(model, inputs or (), dtype, *options).known()
    given = _Case(read(Plan, plan, "--plan"), *known)
    require_samples(given.plan, given.graph, given.cluster)
    edits = _Edits(period, link, slow or [], add or [])
    changed = edits.of(given)
    _tell(given, changed, steps=steps, jitter=jitter, out=out, picture=picture, json=json)


@dataclass(frozen=True)
class _Case:
    """What is simulated."""

    plan: Plan
    cluster: Cluster
    profile: Profile
    graph: Graph
    words: list[str] = field(default_factory=list)

    def play(self, steps: int, jitter: float) -> Forecast:
        from evenly.planner import simulate as play

        return play(self.plan, self.cluster, self.profile, self.graph, steps=steps, jitter=jitter)


@dataclass(frozen=True)
class _Edits:
    """What is to be different."""

    period: str | None
    link: float | None
    slow: list[str]
    add: list[str]

    def of(self, case: _Case) -> _Case | None:
        """Returns the changed case; None where nothing is to be different."""
        plan, cluster, profile = case.plan, case.cluster, case.profile
        words = []
        if self.period is not None:
            plan = with_period(plan, self.period)
            words.append(f"period {self.period}")
        if self.link is not None:
            profile = with_link(profile, cluster, self.link)
            words.append(f"{self.link:g} times the bandwidth between nodes")
        for wish in self.slow:
            profile = with_slow(profile, wish)
            words.append(f"rank {wish.split('=')[0]} at {wish.split('=')[1]} times its speed")
        for wish in self.add:
            cluster, profile = with_device(cluster, profile, wish)
            node, _, like = wish.partition(":")
            words.append(f"a device more on node {node.strip()}" + (f", like rank {like.split()[-1]}" if like else ""))
        if self.add:
            plan = plan_anew(plan, cluster, profile, case.graph)
            cut = "networks may be cut" if case.plan.replicas else "no network is cut, as before"
            period = "the same period" if self.period is None else "that period"
            ranks, samples = counted(cluster.world_size, "rank"), counted(plan.batch_size, "sample")
            words.append(f"planned anew for {ranks}: {samples} a step, {period}, {cut}")
        if self.period is not None:
            plan = settled(plan, cluster, profile, case.graph)
        return _Case(plan, cluster, profile, case.graph, words) if words else None


def _whole_periods(plans: list[Plan]) -> int:
    """Returns steps that are whole periods of each plan, so that no exchange counts for a part of one."""
    each = [steps for plan in plans if (steps := known_steps(plan.period))]
    together = lcm(*each) if lcm(*each) <= MOST_PLAYED else max(each)
    return min(MOST_PLAYED, together * ceil(LEAST_PLAYED / together))


def _tell(
    given: _Case,
    changed: _Case | None,
    *,
    steps: int | None,
    jitter: float,
    out: Path | None,
    picture: Path | None,
    json: bool,
) -> None:
    if steps is None:
        steps = _whole_periods([case.plan for case in (given, changed) if case is not None])
    before = given.play(steps, jitter)
    after = changed.play(steps, jitter) if changed else None
    if out is not None:
        (after or before).save(out)
    if picture is not None:
        panels = [Panel("as planned" if changed else "", rank_rows(given.plan, before, given.cluster), before)]
        if changed is not None and after is not None:
            panels.append(Panel("; ".join(changed.words), rank_rows(changed.plan, after, changed.cluster), after))
        draw_picture(panels, picture)
    if json:
        from json import dumps

        print(dumps({"before": before.model_dump(), "after": after.model_dump() if after else None}, indent=2))
        return
    from evenly.cli._show import say, show_forecasts

    console = Console(highlight=False)
    say([f"changed: {word}" for word in changed.words] if changed else [], console)
    other = (changed.plan, after, changed.cluster) if changed and after else None
    show_forecasts((given.plan, before, given.cluster), other, console=console)
