"""Outcomes of runs -> mean and deviation over seeds, and the difference to the baseline."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

from evenly.recipes.experiments.grid import Cell, Experiment, PlannedRun, columns_of, is_baseline, without_baseline_keys
from evenly.recipes.experiments.results import Outcome

HEADERS = ("run", "seeds", "mean", "deviation", "minus baseline", "s/epoch", "MB sent")
# Of Student's distribution: the 97.5th percentile for 1, 2, ... degrees of freedom, and of the normal distribution.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
Z_975 = 1.959964


@dataclass(frozen=True)
class GroupRow:
    """The runs of one kind: what they differ in from others, and their figures."""

    name: str
    cells: Mapping[str, Cell]
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    mean: float
    deviation: float | None
    difference: float | None  # mean of the paired differences to the baseline's runs of the same seeds
    interval: float | None  # the true difference lies within so much of it, in 95 of 100 cases
    epoch_s: float
    sent_bytes: float
    is_baseline: bool


def group_rows(experiment: Experiment, outcomes: Mapping[PlannedRun, Outcome]) -> list[GroupRow]:
    """Returns a row for each kind of run that has an outcome with the experiment's figure, in the order of the grid."""
    groups: dict[str, dict[int, tuple[PlannedRun, Outcome]]] = {}
    for run, outcome in outcomes.items():
        if experiment.metric in outcome.figures:
            groups.setdefault(run.name, {})[run.seed] = (run, outcome)
    baselines = {
        without_baseline_keys(experiment, run): group
        for group in groups.values()
        for run, _ in group.values()
        if is_baseline(experiment, run)
    }
    rows = [_row(experiment, group, baselines) for group in groups.values()]
    columns = columns_of(experiment)
    return sorted(rows, key=lambda row: [columns[key].index(value) for key, value in row.cells.items()])


def row_cells(row: GroupRow, *, percent: bool) -> tuple[str, ...]:
    """Returns a row as texts under `HEADERS`."""
    return (
        row.name,
        str(len(row.seeds)),
        _number(row.mean, percent=percent),
        "" if row.deviation is None else _number(row.deviation, percent=percent),
        _difference(row, percent=percent),
        f"{row.epoch_s:.3g}" if row.epoch_s else "",
        f"{row.sent_bytes / 1e6:.4g}" if row.sent_bytes < 1e10 else f"{row.sent_bytes / 1e6:.0f}",
    )


def write_results(
    folder: Path, name: str, experiment: Experiment, outcomes: Mapping[PlannedRun, Outcome]
) -> list[Path]:
    """Writes `results.json` and `table.md` into the folder of the experiment; returns their paths."""
    rows = group_rows(experiment, outcomes)
    runs = [
        {
            "run": run.name,
            "cells": dict(run.cells),
            "seed": run.seed,
            "nodes": run.nodes,
            **asdict(outcome),
        }
        for run, outcome in outcomes.items()
    ]
    values = {
        "experiment": name,
        "metric": experiment.metric,
        "baseline": experiment.baseline,
        "rows": [asdict(row) for row in rows],
        "runs": runs,
    }
    texts = {
        "results.json": json.dumps(values, indent=1, allow_nan=False) + "\n",
        "table.md": markdown(experiment, rows),
    }
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    return [folder / file for file in texts]


def markdown(experiment: Experiment, rows: Sequence[GroupRow]) -> str:
    """Returns the table in Markdown."""
    lines = [HEADERS, ("---",) * len(HEADERS), *(row_cells(row, percent=is_percent(experiment)) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def is_percent(experiment: Experiment) -> bool:
    """Returns whether the figure is a part of a whole."""
    return "accuracy" in experiment.metric


def half_interval(differences: Sequence[float]) -> float | None:
    """Returns half of the 95 % interval of the mean of `differences`: t s / sqrt(n); None for fewer than two.

    >>> round(half_interval([1.0, 2.0, 3.0]), 3)
    2.484
    """
    count = len(differences)
    if count < 2:
        return None
    return _t_quantile(count - 1) * stdev(differences) / math.sqrt(count)


def _t_quantile(freedom: int) -> float:
    """Returns the 97.5th percentile; beyond the table by its expansion, which is right to three digits there."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    return Z_975 + (Z_975**3 + Z_975) / (4 * freedom) + (5 * Z_975**5 + 16 * Z_975**3 + 3 * Z_975) / (96 * freedom**2)


def _row(
    experiment: Experiment,
    group: Mapping[int, tuple[PlannedRun, Outcome]],
    baselines: Mapping[tuple[tuple[str, Cell], ...], Mapping[int, tuple[PlannedRun, Outcome]]],
) -> GroupRow:
    seeds = tuple(sorted(group))
    run, _ = group[seeds[0]]
    outcomes = [group[seed][1] for seed in seeds]
    values = tuple(outcome.figures[experiment.metric] for outcome in outcomes)
    of_baseline = is_baseline(experiment, run)
    baseline = {} if of_baseline else baselines.get(without_baseline_keys(experiment, run), {})
    differences = [
        group[seed][1].figures[experiment.metric] - baseline[seed][1].figures[experiment.metric]
        for seed in seeds
        if seed in baseline
    ]
    return GroupRow(
        name=run.name,
        cells=dict(run.cells),
        seeds=seeds,
        values=values,
        mean=mean(values),
        deviation=stdev(values) if len(values) > 1 else None,
        difference=mean(differences) if differences else None,
        interval=half_interval(differences),
        epoch_s=mean(outcome.epoch_s for outcome in outcomes),
        sent_bytes=mean(outcome.sent_bytes for outcome in outcomes),
        is_baseline=of_baseline,
    )


def _difference(row: GroupRow, *, percent: bool) -> str:
    if row.is_baseline:
        return "baseline"
    if row.difference is None:
        return ""
    sign = "+" if row.difference >= 0 else ""
    spread = "" if row.interval is None else f" ± {_number(row.interval, percent=percent)}"
    return f"{sign}{_number(row.difference, percent=percent)}{spread}"


def _number(value: float, *, percent: bool) -> str:
    return f"{100 * value:.2f} %" if percent else f"{value:.4f}"
