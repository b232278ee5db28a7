"""Run -> lines of charts: logged values, samples per second, bytes, drift, periods, batches, over time and steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenly.reports.fresh_start import exchanges_of, since_fresh_start
from evenly.reports.page.downsample import kept_points, rounded
from evenly.reports.rank_times import Numbers, RankTimes
from evenly.reports.time_axis import TimeAxis
from evenly.spec import Measured, PeriodChosen, Rebalanced, Run, RunStarted, StepsDone

LEAST_BINS, MOST_BINS = 12, 240  # of rates over time
NEGLIGIBLE = 0.01  # interfaces that sent less than this part of what was counted: all went over loopback


@dataclass(frozen=True)
class Points:
    """A line: seconds of training, steps, and values, of which some may be NaN."""

    name: str
    time_s: Numbers
    step: Numbers
    value: Numbers

    def to_data(self, *, most: int) -> dict[str, object]:
        """Returns the line for the page, in at most `most` points."""
        kept = kept_points(self.value, most=most)
        columns = {"t": self.time_s, "step": self.step, "v": self.value}
        return {"name": self.name, **{key: rounded(column[kept], digits=6) for key, column in columns.items()}}


def points_of(name: str, rows: Sequence[tuple[float, float, float]]) -> Points:
    """Returns a line through rows of time, step and value."""
    columns = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return Points(name, *columns)


def logged_lines(run: Run, axis: TimeAxis) -> list[Points]:
    """Returns a line for each name under which numbers were logged.

    What a resumed run repeats counts as it was the second time.
    """
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for event in since_fresh_start(run).events:
        if isinstance(event, RunStarted):
            rows = {name: [row for row in line if row[1] <= event.resumed_step] for name, line in rows.items()}
        elif isinstance(event, Measured):
            for name, value in event.values.items():
                number = float("nan") if value is None else value
                rows.setdefault(name, []).append((axis.seconds(event.at_s), event.step, number))
    return [points_of(name, line) for name, line in rows.items() if line]


def throughput(run: Run, times: Sequence[RankTimes], axis: TimeAxis, *, is_whole: bool = True) -> Points | None:
    """Returns the samples per second of all ranks, from what ranks recorded.

    If that is nothing, or not of all ranks (`is_whole`), from the progress of the run.
    """
    shown = [part for part in times if len(part)]
    if shown and is_whole:
        edges, steps = _bins(shown)
        counted = sum(
            (_amount(part.ended_s, part.samples, part.begins_s, edges) for part in shown), np.zeros(len(edges) - 1)
        )
        return Points("samples/s", _middles(edges), _middles(steps), counted / np.diff(edges))
    rows = []
    before: StepsDone | RunStarted | None = None
    for event in since_fresh_start(run).events:
        if isinstance(event, StepsDone) and before is not None and event.at_s > before.at_s:
            samples = event.samples - (before.samples if isinstance(before, StepsDone) else 0)
            rows.append((axis.seconds(event.at_s), float(event.step), samples / (event.at_s - before.at_s)))
        before = event if isinstance(event, StepsDone | RunStarted) else before
    return points_of("samples/s", rows) if rows else None


def sent_lines(times: Sequence[RankTimes]) -> dict[str, list[Points]]:
    """Returns for each node the bytes per second that it sent: in exchanges, for gradients, over its interfaces."""
    shown = [part for part in times if len(part)]
    if not shown:
        return {}
    edges, steps = _bins(shown)
    lines: dict[str, list[Points]] = {"exchanges": [], "gradients": [], "interfaces": []}
    for node in sorted({part.started.node for part in shown}):
        sums = {kind: np.zeros(len(edges) - 1) for kind in lines}
        for part in shown:
            if part.started.node != node:
                continue
            merged_s = np.array([part.begins_s + done.at_s for done in part.exchanges])
            sent = np.array([float(done.sent_bytes) for done in part.exchanges])
            sums["exchanges"] += np.histogram(merged_s, edges, weights=sent)[0] if len(sent) else 0.0
            sums["gradients"] += _amount(part.ended_s, part.gradient_bytes, part.begins_s, edges)
            at_s = np.array([part.begins_s + link.at_s for link in part.links])
            counted = np.diff(np.array([float(link.sent_bytes) for link in part.links]), prepend=0.0)
            sums["interfaces"] += _amount(at_s, counted, part.begins_s, edges)
        for kind, counted in sums.items():
            rate = np.maximum(0.0, counted) / np.diff(edges)
            lines[kind].append(Points(f"node {node}", _middles(edges), _middles(steps), rate))
    most = {kind: max(float(line.value.max()) for line in nodes) for kind, nodes in lines.items()}
    if most["interfaces"] < NEGLIGIBLE * max(most["exchanges"], most["gradients"]):
        del lines["interfaces"]
    return {kind: nodes for kind, nodes in lines.items() if most[kind]}


def exchange_lines(run: Run, axis: TimeAxis) -> dict[str, Points]:
    """Returns the drift of the node of rank 0, and the seconds of exchanges and of waiting for them."""
    done = exchanges_of(run)
    if not done:
        return {}

    def line(name: str, values: list[float]) -> Points:
        rows = [
            (axis.seconds(event.at_s), float(event.merged or event.step), value)
            for event, value in zip(done, values, strict=True)
        ]
        return points_of(name, rows)

    drift = {"drift": line("drift", [event.drift for event in done])} if any(event.drift for event in done) else {}
    return {
        **drift,
        "seconds": line("exchange", [event.seconds for event in done]),
        "waited": line("training waited", [event.waited_s for event in done]),
    }


def period_line(run: Run, axis: TimeAxis) -> Points | None:
    """Returns the steps between exchanges as they were chosen during the run."""
    chosen = since_fresh_start(run).of(PeriodChosen)
    rows = [(axis.seconds(event.at_s), float(event.step), float(event.steps)) for event in chosen]
    return points_of("steps between exchanges", rows) if rows else None


def batch_lines(run: Run, axis: TimeAxis) -> list[Points]:
    """Returns the samples of each rank, or network, over time; empty if they never changed."""
    whole = since_fresh_start(run)
    changes = whole.of(Rebalanced)
    if not changes:
        return []
    started = whole.of(RunStarted)
    plan = started[0].plan if started else None
    first = tuple(plan.roles[rank].samples for rank in plan.takers) if plan is not None else ()
    rows = [(0.0, 0.0, first)] if len(first) == len(changes[0].samples) else []
    rows += [(axis.seconds(change.at_s), float(change.step), change.samples) for change in changes]
    last = whole.events[-1]
    rows.append((axis.seconds(last.at_s), float(max(row[1] for row in rows)), changes[-1].samples))
    count = min(len(samples) for _, _, samples in rows)
    return [
        points_of(f"rank {rank}", [(time_s, step, float(samples[rank])) for time_s, step, samples in rows])
        for rank in range(count)
    ]


def _bins(times: Sequence[RankTimes]) -> tuple[Numbers, Numbers]:
    """Returns the borders of equal times, and the step that the first rank had reached at each."""
    first = [part for part in times if part.started.rank == times[0].started.rank]
    bins = min(MOST_BINS, max(LEAST_BINS, sum(map(len, first)) // 2))
    end_s = max(float(part.ended_s[-1]) for part in times)
    edges = np.linspace(0.0, max(1e-9, end_s), bins + 1)
    reached_s = np.concatenate([np.append(part.begins_s, part.ended_s) for part in first])
    reached = np.concatenate([np.append(part.step[0] - part.steps[0], part.step) for part in first])
    return edges, np.interp(edges, reached_s, reached)


def _amount(ended_s: Numbers, amounts: Numbers, begins_s: float, edges: Numbers) -> Numbers:
    """Returns what fell into each bin of amounts that were spread evenly until each time."""
    if not len(ended_s):
        return np.zeros(len(edges) - 1)
    total = np.interp(edges, np.append(begins_s, ended_s), np.append(0.0, np.cumsum(amounts)))
    return np.diff(total)


def _middles(edges: Numbers) -> Numbers:
    return (edges[1:] + edges[:-1]) / 2
