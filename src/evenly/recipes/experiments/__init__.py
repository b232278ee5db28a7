"""Experiments: a grid of settings and seeds in a TOML file -> runs -> a table with mean and deviation."""

from evenly.recipes.experiments.grid import (
    Experiment,
    PlannedRun,
    describe_experiment,
    experiment_names,
    load_experiment,
    planned_runs,
)
from evenly.recipes.experiments.plots import draw_curves
from evenly.recipes.experiments.results import Outcome, read_outcome
from evenly.recipes.experiments.runner import Runner
from evenly.recipes.experiments.table import (
    HEADERS,
    GroupRow,
    group_rows,
    is_percent,
    markdown,
    row_cells,
    write_results,
)

__all__ = [
    "HEADERS",
    "Experiment",
    "GroupRow",
    "Outcome",
    "PlannedRun",
    "Runner",
    "describe_experiment",
    "draw_curves",
    "experiment_names",
    "group_rows",
    "is_percent",
    "load_experiment",
    "markdown",
    "planned_runs",
    "read_outcome",
    "row_cells",
    "write_results",
]
