"""`evenly simulate`: predicted times of a plan, also on a changed cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, lcm
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
    from evenly.spec import Cluster, Forecast, Graph, Plan, Profile

LEAST_STEPS, MOST_STEPS = 1000, 10**6  # steps, unless --steps is given


def simulate(
    plan: Annotated[Path, typer.Option(help="The plan, from evenly plan.")],
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
    steps: Annotated[
        int | None, typer.Option(help="How many steps to play; in whole periods, 1000 or more, if left out.")
    ] = None,
    jitter: Annotated[float, typer.Option(help="How much a rank's time varies: deviation over mean.")] = 0.0,
    period: Annotated[
        str | None, typer.Option(metavar="K|30s|2%|epoch|5 epochs|adaptive|global", help="What if: another period K'.")
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
    record: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Write the (changed) run to this folder, as training would; for report."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Simulate a plan, and with what-if options a changed one beside it. Nothing runs; no torch is needed.

    Examples: `evenly simulate --plan plan.json --cluster cluster.json --profile profile.json --graph graph.json`;
    the same with `--link 0.5`, `--slow 2=0.25`, `--period 200` or `--add 1:like 0`.
    """
    from evenly.cli._documents import read, require_writable
    from evenly.cli._edits import require_samples
    from evenly.cli._known import Options
    from evenly.reports import require_no_run, require_picture
    from evenly.spec import Plan

    require_writable(out, picture)
    if picture is not None:
        require_picture(picture)
    if record is not None:
        require_no_run(record)
    options = (cluster, profile, graph, speeds, nodes, flops, inside, across)
    described = Options(model, inputs or (), dtype, *options).load()
    planned = _Case(read(Plan, plan, "--plan"), *described)
    require_samples(planned.plan, planned.graph, planned.cluster)
    edits = _Edits(period, link, slow or [], add or [])
    changed = edits.of(planned)
    _show(planned, changed, steps=steps, jitter=jitter, out=out, picture=picture, record=record, json=json)


@dataclass(frozen=True)
class _Case:
    """A plan and the cluster, profile and network it is simulated with."""

    plan: Plan
    cluster: Cluster
    profile: Profile
    graph: Graph
    changes: list[str] = field(default_factory=list)

    def simulate(self, steps: int, jitter: float, *, record: Path | None = None) -> Forecast:
        """Returns the forecast, and writes the run into the folder `record` if there is one."""
        from evenly.planner import simulate as play
        from evenly.planner import simulate_run

        values = (self.plan, self.cluster, self.profile, self.graph)
        if record is None:
            return play(*values, steps=steps, jitter=jitter)
        from evenly.reports import write_run

        simulated = simulate_run(*values, name=record.name, steps=steps, jitter=jitter)
        write_run(record, simulated.run, simulated.parts)
        return simulated.forecast


@dataclass(frozen=True)
class _Edits:
    """The what-if options."""

    period: str | None
    link: float | None
    slow: list[str]
    add: list[str]

    def of(self, case: _Case) -> _Case | None:
        """Returns the changed case; None without changes."""
        from evenly.cli._edits import plan_anew, settled, with_device, with_link, with_period, with_slow
        from evenly.spec.plan import counted

        plan, cluster, profile = case.plan, case.cluster, case.profile
        changes = []
        if self.period is not None:
            plan = with_period(plan, self.period)
            changes.append(f"period {self.period}")
        if self.link is not None:
            profile = with_link(profile, cluster, self.link)
            changes.append(f"{self.link:g} times the bandwidth between nodes")
        for option in self.slow:
            profile = with_slow(profile, option)
            changes.append(f"rank {option.split('=')[0]} at {option.split('=')[1]} times its speed")
        for option in self.add:
            cluster, profile = with_device(cluster, profile, option)
            node, _, like = option.partition(":")
            changes.append(
                f"a device more on node {node.strip()}" + (f", like rank {like.split()[-1]}" if like else "")
            )
        if self.add:
            plan = plan_anew(plan, cluster, profile, case.graph)
            cut = "networks may be cut" if case.plan.replicas else "no network is cut, as before"
            period = "the same period" if self.period is None else "that period"
            ranks, samples = counted(cluster.world_size, "rank"), counted(plan.batch_size, "sample")
            changes.append(f"planned anew for {ranks}: {samples} a step, {period}, {cut}")
        if self.period is not None:
            plan = settled(plan, cluster, profile, case.graph)
        return _Case(plan, cluster, profile, case.graph, changes) if changes else None


def _whole_periods(plans: list[Plan]) -> int:
    """Returns steps that are whole periods of each plan, so that the exchanges are whole too."""
    from evenly.spec.period import known_steps

    period_steps = [steps for plan in plans if (steps := known_steps(plan.period))]
    together = lcm(*period_steps) if lcm(*period_steps) <= MOST_STEPS else max(period_steps)
    return min(MOST_STEPS, together * ceil(LEAST_STEPS / together))


def _show(
    planned: _Case,
    changed: _Case | None,
    *,
    steps: int | None,
    jitter: float,
    out: Path | None,
    picture: Path | None,
    record: Path | None,
    json: bool,
) -> None:
    if steps is None:
        steps = _whole_periods([case.plan for case in (planned, changed) if case is not None])
    before = planned.simulate(steps, jitter, record=None if changed else record)
    after = changed.simulate(steps, jitter, record=record) if changed else None
    if out is not None:
        (after or before).save(out)
    if picture is not None:
        from evenly.reports import Panel, draw_picture, rank_rows

        panels = [Panel("as planned" if changed else "", rank_rows(planned.plan, before, planned.cluster), before)]
        if changed is not None and after is not None:
            panels.append(Panel("; ".join(changed.changes), rank_rows(changed.plan, after, changed.cluster), after))
        draw_picture(panels, picture)
    if json:
        from json import dumps

        print(dumps({"before": before.model_dump(), "after": after.model_dump() if after else None}, indent=2))
        return
    from evenly.cli._show import open_console, say, show_forecasts

    console = open_console()
    say([f"changed: {change}" for change in changed.changes] if changed else [], console)
    after_case = (changed.plan, after, changed.cluster) if changed and after else None
    show_forecasts((planned.plan, before, planned.cluster), after_case, console=console)
    say([f"recorded as a run in {record}"] if record is not None else [], console)
