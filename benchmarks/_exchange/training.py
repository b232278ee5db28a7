"""The parts of `exchange.py --full` that train to the end: accuracy of each form, adaptive periods, a sweep of K'.

A ResNet of 0.27 million parameters on Fashion-MNIST, 2 nodes x 2 ranks on the lab, 1000 steps. Shorter runs of a larger
network (400 steps, 1.07 million parameters) take as long, and their accuracies differ by half a point by seed. Adaptive
periods and the sweep have half the batch and 1200 steps: there the link limits also cores that compute slowly.
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks._exchange.parts import Slice
from benchmarks.common import RESULTS_DIR, Claim, Row, median
from benchmarks.recipe_runs import final_accuracy, summary, totals, train, two_node_cluster
from evenly.lab import Lab
from evenly.spec import ExchangeDone, PeriodChosen, Run

Settings = dict[str, Any]  # of the recipe, by name
SETTINGS: Settings = {
    "width": 30,
    "batch_size": 16,
    "epochs": 5,
    "train_limit": 12800,
    "evaluate_every": 0,
    "lr": 0.05,
    "checkpoint_every": "none",
}
LINK_BOUND: Settings = {"batch_size": 8, "epochs": 3, "lr": 0.01}
QUICK: Settings = {"epochs": 1, "train_limit": 1024, "test_limit": 1000}
FORMS: dict[str, Settings] = {
    "waited for": {},
    "overlap": {"overlap": 3},
    "fragments": {"fragments": 4},
    "int8": {"codec": "int8"},
    "all": {"overlap": 3, "fragments": 2, "codec": "int8"},
    "Nesterov": {"outer": "nesterov"},
}
ADAPTIVE: Settings = {"every": "20%", "overlap": 2, "codec": "int8"}
PERIODS = ("1", "2", "5", "10", "20", "50", "epoch")


def accuracy_part(seeds: int, *, quick: bool) -> Slice:
    """Returns the accuracy of each form of the exchange after equal epochs; links are not shaped."""
    methods = {name: {"every": 8, **form} for name, form in FORMS.items()}
    runs = _runs(methods, seeds, rate=None, quick=quick)
    rows = [_row("accuracy", name, None, own_runs) for name, own_runs in runs.items()]
    mean = {row["method"]: row["accuracy_percent"] for row in rows}
    sync = mean["waited for"]
    worst = min(mean[form] for form in ("overlap", "fragments", "int8", "all"))
    return rows, [
        Claim("accuracy_points_all_minus_sync", mean["all"] - sync, -0.3, "higher"),
        Claim("accuracy_points_worst_form_minus_sync", worst - sync, -0.3, "higher"),
        Claim("accuracy_points_nesterov_minus_sync", mean["Nesterov"] - sync, 0.0, "higher"),
    ]


def adaptive_part(seeds: int, *, quick: bool) -> Slice:
    """Returns time and accuracy of adaptive periods beside gradients averaged over all ranks, at 50 Mbit/s."""
    methods = {"global": LINK_BOUND | {"every": "global"}, "adaptive": LINK_BOUND | ADAPTIVE}
    runs = _runs(methods, seeds, rate=50.0, quick=quick)
    rows = [_row("adaptive", name, 50.0, own_runs) for name, own_runs in runs.items()]
    speedups = [
        totals(everywhere).seconds / totals(adaptive).seconds
        for everywhere, adaptive in zip(runs["global"], runs["adaptive"], strict=True)
    ]
    difference = rows[1]["accuracy_percent"] - rows[0]["accuracy_percent"]
    return rows, [
        Claim("adaptive_speedup_to_ddp_accuracy_50mbit", median(speedups), 3.0, "higher"),
        Claim("accuracy_points_adaptive_minus_ddp", difference, -0.3, "higher"),
    ]


def sweep_part(seeds: int, *, quick: bool) -> Slice:
    """Returns accuracy, time and bytes for each period, at 200 Mbit/s, and draws them."""
    methods = {f"K' = {period}": LINK_BOUND | {"every": period} for period in PERIODS}
    runs = _runs(methods, seeds, rate=200.0, quick=quick)
    rows = [_row("sweep", name, 200.0, own_runs) for name, own_runs in runs.items()]
    if not quick:
        _draw(rows, RESULTS_DIR / "exchange_sweep.png")
    return rows, []


def _runs(methods: dict[str, Settings], seeds: int, *, rate: float | None, quick: bool) -> dict[str, list[Run]]:
    """Returns the runs of each method, one for each seed; methods take turns, seed by seed."""
    settings = SETTINGS | (QUICK if quick else {})
    runs: dict[str, list[Run]] = {method: [] for method in methods}
    with tempfile.TemporaryDirectory() as folder, Lab(two_node_cluster(rate)) as lab:
        for seed in range(seeds):
            for number, (method, own_settings) in enumerate(methods.items()):
                run = train(lab, Path(folder) / f"{number}-{seed}", settings | own_settings | {"seed": seed})
                runs[method].append(run)
                print(f"seed {seed}, {method}: {summary(run)}", flush=True)
    return runs


def _row(part: str, method: str, rate: float | None, runs: list[Run]) -> Row:
    """Returns the medians of a method's runs and the accuracy of each."""
    accuracies = [100 * final_accuracy(run) for run in runs]
    waits = [sum(done.waited_s for done in run.of(ExchangeDone)) for run in runs]
    return {
        "part": part,
        "nodes": "2 + 2",
        "mbit_per_s": rate,
        "method": method,
        "seconds": median([totals(run).seconds for run in runs]),
        "mb_across": median([sum(totals(run).interface_bytes) / 1e6 for run in runs]),
        "exchanges": totals(runs[0]).exchanges,
        "waited_s": median(waits),
        "accuracy_percent": sum(accuracies) / len(accuracies),
        "accuracies": [round(accuracy, 2) for accuracy in accuracies],
        "periods": [event.steps for event in runs[0].of(PeriodChosen)],
    }


def _draw(rows: list[Row], file: Path) -> None:
    """Draws accuracy, time and bytes against the period."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained")
    kinds = (("accuracy_percent", "test accuracy, %"), ("seconds", "time, s"), ("mb_across", "across nodes, MB"))
    for axes, (key, label) in zip(figure.subplots(1, 3), kinds, strict=True):
        axes.plot(range(len(rows)), [row[key] for row in rows], "o-", color="#30638e")
        axes.set_xticks(range(len(rows)), [row["method"].removeprefix("K' = ") for row in rows])
        axes.set_xlabel("period K', steps")
        axes.set_title(label, fontsize=10)
        if key == "mb_across":
            axes.set_yscale("log")
        if key == "seconds":
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
