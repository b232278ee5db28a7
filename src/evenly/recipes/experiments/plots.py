"""Outcomes of runs -> a picture: the figure of each kind of run after every epoch, mean and deviation over seeds."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev

from evenly.recipes.experiments.grid import Experiment, PlannedRun
from evenly.recipes.experiments.results import Outcome


def draw_curves(file: Path, experiment: Experiment, outcomes: Mapping[PlannedRun, Outcome]) -> bool:
    """Writes the picture, and returns whether it could: that needs matplotlib, and runs of two epochs or more."""
    curves = _curves(experiment, outcomes)
    if not curves or find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        epochs = sorted(points)
        middle = [mean(points[epoch]) for epoch in epochs]
        spread = [stdev(points[epoch]) if len(points[epoch]) > 1 else 0.0 for epoch in epochs]
        (line,) = axes.plot(epochs, middle, label=name, marker="." if len(epochs) < 30 else None)
        low, high = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(epochs, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="epoch", ylabel=experiment.metric.replace("_", " "))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(file)
    return True


def _curves(experiment: Experiment, outcomes: Mapping[PlannedRun, Outcome]) -> dict[str, dict[int, list[float]]]:
    """Returns the values of all seeds after each epoch, by the name of the kind of run."""
    curves: dict[str, dict[int, list[float]]] = {}
    for run, outcome in outcomes.items():
        for row in outcome.curve:
            if experiment.metric in row:
                curves.setdefault(run.name, {}).setdefault(int(row["epoch"]), []).append(row[experiment.metric])
    return {name: points for name, points in curves.items() if len(points) > 1}
