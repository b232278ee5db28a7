"""Runs with what their ranks recorded: two ranks and one, exchanges, logged values, a plan that predicts."""

from pathlib import Path

from evenly.planner import plan, simulate_run
from evenly.reports import write_run
from evenly.reports.reading import RecordedRun, read_recorded
from evenly.spec import (
    Event,
    EverySteps,
    Measured,
    PeriodChosen,
    Plan,
    RankLogs,
    RankPart,
    RankStarted,
    Rebalanced,
    Run,
    StepTimes,
)
from tests.reports.plans import cluster_of, graph_of, profile_of

SPEEDS = [60.0, 30.0, 10.0]


def simulated(*, steps: int = 200, seed: int = 0, every: object = 10, jitter: float = 0.1, name: str = "first"):
    """Returns a simulated run of three ranks on two nodes."""
    cluster, graph = cluster_of(2, 1), graph_of()
    profile = profile_of(cluster, SPEEDS, graph)
    made = plan(cluster, profile, graph, every=every, cut=False)
    return simulate_run(made, cluster, profile, graph, name=name, steps=steps, jitter=jitter, seed=seed)


def write_big(folder: Path) -> Path:
    """Writes a run of 100,000 steps on 8 ranks of three nodes."""
    cluster, graph = cluster_of(4, 3, 1), graph_of()
    profile = profile_of(cluster, [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0], graph)
    even = Plan.even(cluster, batch_size=12, period=EverySteps(10))
    made = simulate_run(even, cluster, profile, graph, name=folder.name, steps=100_000, jitter=0.1)
    write_run(folder, made.run, made.parts)
    return folder


def write_recorded(folder: Path, *, seed: int = 0, steps: int = 200, every: object = 10) -> Path:
    """Writes a run that looks trained: with losses, accuracies, a new period and other batches."""
    made = simulated(steps=steps, seed=seed, every=every, name=folder.name)
    end_s = made.run.events[-1].at_s
    more: list[Event] = [
        Measured(at_s=end_s * n / 40, step=steps * n // 40, values={"loss": 2.0 / (n + seed / 9 + 1)})
        for n in range(1, 40)
    ]
    more += [
        Measured(at_s=end_s * n / 4, step=steps * n // 4, values={"accuracy": 0.5 + n / 10 + seed / 100})
        for n in range(1, 5)
    ]
    more.append(PeriodChosen(at_s=end_s / 2, step=steps // 2, steps=12, why="exchanges take too long"))
    more.append(Rebalanced(at_s=end_s / 2, step=steps // 2, samples=(50, 40, 10)))
    first, *rest, last = made.run.events
    first = first.model_copy(update={"settings": {"seed": seed}})
    events = (first, *sorted([*rest, *more], key=lambda event: event.at_s), last)
    write_run(folder, Run(events=events), made.parts)
    return folder


def recorded(folder: Path, **wishes: object) -> RecordedRun:
    return read_recorded(write_recorded(folder, **wishes))  # type: ignore[arg-type]


def part(rank: int, node: int, *rows: StepTimes, host: str = "", at_s: float = 0.0, **events: object) -> RankPart:
    return RankPart(RankStarted(at_s=at_s, rank=rank, node=node, host=host), rows, **events)  # type: ignore[arg-type]


def of_parts(*parts: RankPart, events: tuple[Event, ...] = ()) -> RecordedRun:
    return RecordedRun("parts", Run(events=events), RankLogs(parts))
