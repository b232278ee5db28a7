"""Runs -> groups of equal settings but the seed, with the mean and deviation of each figure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import mean, stdev

import numpy as np

from evenly.reports.page.bars import Bar, Segment
from evenly.reports.page.downsample import rounded
from evenly.reports.page.lines import Points
from evenly.reports.reading import RecordedRun
from evenly.reports.table import TableRow
from evenly.spec import RunStarted
from evenly.spec.plan import counted

GRID = 160  # points of a line of means


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only, by their place among all."""

    name: str
    runs: tuple[int, ...]


def groups_of(runs: Sequence[RecordedRun]) -> list[Group]:
    """Returns the groups, in the order of their first runs."""
    members: dict[str, list[int]] = {}
    for place, recorded in enumerate(runs):
        members.setdefault(_settings(recorded) or f"alone {place}", []).append(place)
    groups = [Group(_name([runs[place].name for place in places]), tuple(places)) for places in members.values()]
    names = [group.name for group in groups]
    return [
        Group(f"{group.name} ({n})" if names.count(group.name) > 1 else group.name, group.runs)
        for n, group in enumerate(groups, start=1)
    ]


def _settings(recorded: RecordedRun) -> str:
    """Returns all that a run was asked to do, but its seed, as text; empty if that was not recorded.

    Shares that were measured differ a little from run to run, and count as the same wish.
    """
    started = recorded.run.last(RunStarted)
    if started is None:
        return ""
    settings = {name: value for name, value in started.settings.items() if not name.lower().endswith("seed")}
    sizes = [(len(node.ranks), [device.kind for device in node.devices]) for node in started.cluster.nodes]
    wishes: list[object] = [sizes, sorted(settings.items())]
    if (plan := started.plan) is not None:
        is_measured = plan.predicted is not None
        wishes += [plan.period, plan.exchange, plan.graph, plan.rebalance, is_measured, len(plan.replicas)]
        wishes += [plan.batch_size] if is_measured else [plan.batch_shares]
    return repr(wishes)


def _name(names: Sequence[str]) -> str:
    """Returns what names have in common.

    >>> _name(["every10-seed0", "every10-seed1"]), _name(["a"]), _name(["a", "b"])
    ('every10', 'a', 'a and 1 more')
    """
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    prefix = "".join(letters[0] for letters in same)
    common = re.sub(r"[-_. ]*(seed|run)?[-_. =]*\d*$", "", prefix, flags=re.IGNORECASE)
    if len(names) == 1:
        return names[0]
    return common or f"{names[0]} and {len(names) - 1} more"


GROUP_HEADERS = ("group", "runs", "time s", "samples/s", "MB", "exch.", "acc. %")
_FIGURES: tuple[tuple[Callable[[TableRow], float | None], str], ...] = (
    (lambda row: row.seconds, ".1f"),
    (lambda row: row.samples_per_s, ".0f"),
    (lambda row: row.mb_across, ".1f"),
    (lambda row: row.exchanges, ".0f"),
    (lambda row: None if row.accuracy is None else 100 * row.accuracy, ".2f"),
)


def group_cells(group: Group, rows: Sequence[TableRow]) -> tuple[str, ...]:
    """Returns a group as texts, under `GROUP_HEADERS`: the mean of its finished runs, and their standard deviation."""
    figures = [[figure(rows[place]) for place in group.runs] for figure, _ in _FIGURES]
    texts = [
        mean_words([value for value in values if value is not None], form)
        for values, (_, form) in zip(figures, _FIGURES, strict=True)
    ]
    return (group.name, str(len(group.runs)), *texts)


def group_bars(groups: Sequence[Group], rows: Sequence[TableRow]) -> list[tuple[str, list[Bar]]]:
    """Returns bars of the time and throughput of each group: the mean, with the deviation around it."""
    charts = []
    for name, (figure, form) in (("time, seconds", _FIGURES[0]), ("throughput, samples/s", _FIGURES[1])):
        values = [[value for place in group.runs if (value := figure(rows[place])) is not None] for group in groups]
        tops = [mean(some) + (stdev(some) if len(some) > 1 else 0.0) for some in values if some]
        top = max(tops, default=0.0)
        if top <= 0:
            continue
        bars = []
        for number, (group, some) in enumerate(zip(groups, values, strict=True)):
            middle, spread = (mean(some), stdev(some) if len(some) > 1 else 0.0) if some else (0.0, 0.0)
            segment = Segment(f"c{number % 8}", 0.0, round(1000 * middle / top, 2), mean_words(some, form))
            whisker = (1000 * max(0.0, middle - spread) / top, 1000 * (middle + spread) / top) if spread else None
            detail = counted(len(group.runs), "run")
            bars.append(Bar(group.name, detail, (segment,), mean_words(some, form), whisker=whisker))
        charts.append((name, bars))
    return charts


def mean_words(values: Sequence[float], form: str) -> str:
    """Returns the mean of values and, of several, their standard deviation.

    >>> mean_words([1.0, 3.0], ".1f"), mean_words([1.0], ".1f"), mean_words([], ".1f")
    ('2.0 ± 1.4', '1.0', '-')
    """
    if not values:
        return "-"
    spread = f" ± {stdev(values):{form}}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{spread}"


def mean_line(lines: Sequence[Points], *, axis: str) -> dict[str, object] | None:
    """Returns the mean of lines over the stretch of `axis` ("t" or "step") that all have, and the deviation around it.

    None for fewer than two lines.
    """
    columns = [(line.time_s if axis == "t" else line.step, line.value) for line in lines]
    finite = [(at[np.isfinite(value)], value[np.isfinite(value)]) for at, value in columns]
    usable = [(at, value) for at, value in finite if len(at)]
    if len(usable) < 2:
        return None
    begin, end = max(float(at.min()) for at, _ in usable), min(float(at.max()) for at, _ in usable)
    grid = np.linspace(begin, max(begin, end), GRID if end > begin else 1)
    table = np.stack([np.interp(grid, at, value) for at, value in usable])
    middle, spread = table.mean(axis=0), table.std(axis=0, ddof=1)
    parts = {"x": grid, "v": middle, "low": middle - spread, "high": middle + spread}
    return {key: rounded(part) for key, part in parts.items()}
