"""The parts of `exchange.py --full` that train to the end: accuracy of each form, adaptive periods, a sweep of K'.

A ResNet of 0.27 million parameters on Fashion-MNIST, 2 nodes x 2 ranks on the lab, 1000 steps. Shorter runs of a larger
network (400 steps, 1.07 million parameters) take as long, and their accuracies differ by half a point by seed. Adaptive
periods and the sweep have half the batch and 1200 steps: there the wire decides also on cores that compute slowly.
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS_DIR, Claim, median
from benchmarks.fashion import accuracy_of, end_of, train
from evenly.lab import Lab, LabCluster, LabNode
from evenly.spec import ExchangeDone, PeriodChosen, Run

SETTINGS: dict[str, Any] = {
    "width": 30, "batch_size": 16, "epochs": 5, "train_limit": 12800, "evaluate_every": 0, "lr": 0.05,
    "checkpoint_every": "none",
}  # fmt: skip
WIRED: dict[str, Any] = {"batch_size": 8, "epochs": 3, "lr": 0.01}
QUICK: dict[str, Any] = {"epochs": 1, "train_limit": 1024, "test_limit": 1000}
FORMS: dict[str, dict[str, Any]] = {
    "waited for": {},
    "overlap": {"overlap": 3},
    "fragments": {"fragments": 4},
    "int8": {"codec": "int8"},
    "all": {"overlap": 3, "fragments": 2, "codec": "int8"},
    "Nesterov": {"outer": "nesterov"},
}
ADAPTIVE: dict[str, Any] = {"every": "20%", "overlap": 2, "codec": "int8"}
PERIODS = ("1", "2", "5", "10", "20", "50", "epoch")
Part = tuple[list[dict[str, Any]], list[Claim]]


def accuracy_part(seeds: int, *, quick: bool) -> Part:
    """Returns what each form of the exchange learns, in equal epochs; links are not shaped."""
    ways = {name: {"every": 8, **form} for name, form in FORMS.items()}
    runs = _runs(ways, seeds, rate=None, quick=quick)
    rows = [_row("accuracy", name, None, own) for name, own in runs.items()]
    mean = {row["method"]: row["accuracy_percent"] for row in rows}
    forms = ("overlap", "fragments", "int8", "all")
    return rows, [
        Claim("accuracy_points_all_minus_sync", mean["all"] - mean["waited for"], -0.3, "higher"),
        Claim(
            "accuracy_points_worst_form_minus_sync",
            min(mean[form] for form in forms) - mean["waited for"],
            -0.3,
            "higher",
        ),
        Claim("accuracy_points_nesterov_minus_sync", mean["Nesterov"] - mean["waited for"], 0.0, "higher"),
    ]


def adaptive_part(seeds: int, *, quick: bool) -> Part:
    """Returns how much sooner adaptive periods come as far as gradients averaged everywhere, at 50 Mbit/s."""
    ways = {"global": WIRED | {"every": "global"}, "adaptive": WIRED | ADAPTIVE}
    runs = _runs(ways, seeds, rate=50.0, quick=quick)
    rows = [_row("adaptive", name, 50.0, own) for name, own in runs.items()]
    pairs = list(zip(runs["global"], runs["adaptive"], strict=True))
    gap = rows[1]["accuracy_percent"] - rows[0]["accuracy_percent"]
    return rows, [
        Claim(
            "adaptive_speedup_to_ddp_accuracy_50mbit",
            median([end_of(a).seconds / end_of(b).seconds for a, b in pairs]),
            3.0,
            "higher",
        ),
        Claim("accuracy_points_adaptive_minus_ddp", gap, -0.3, "higher"),
    ]


def sweep_part(seeds: int, *, quick: bool) -> Part:
    """Returns accuracy, time and bytes for each period, at 200 Mbit/s, and draws them."""
    ways = {f"K' = {period}": WIRED | {"every": period} for period in PERIODS}
    runs = _runs(ways, seeds, rate=200.0, quick=quick)
    rows = [_row("sweep", name, 200.0, own) for name, own in runs.items()]
    if not quick:
        _draw(rows, RESULTS_DIR / "exchange_sweep.png")
    return rows, []


def _runs(ways: dict[str, dict[str, Any]], seeds: int, *, rate: float | None, quick: bool) -> dict[str, list[Run]]:
    """Trains all ways in turns, seed by seed."""
    settings = SETTINGS | (QUICK if quick else {})
    cluster = LabCluster(nodes=tuple(LabNode(name=f"node{i}", ranks=2, rate_mbit=rate) for i in range(2)))
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder, Lab(cluster) as lab:
        for seed in range(seeds):
            for number, (way, wishes) in enumerate(ways.items()):
                run = train(lab, Path(folder) / f"{number}-{seed}", settings | wishes | {"seed": seed})
                runs[way].append(run)
                print(f"seed {seed}, {way}: {end_of(run).seconds:.1f} s, {100 * accuracy_of(run):.2f} %", flush=True)
    return runs


def _row(part: str, method: str, rate: float | None, runs: list[Run]) -> dict[str, Any]:
    accuracies = [100 * accuracy_of(run) for run in runs]
    exchanges = [run.of(ExchangeDone) for run in runs]
    chosen = [run.of(PeriodChosen) for run in runs]
    return {
        "part": part,
        "nodes": "2 + 2",
        "mbit_per_s": rate,
        "method": method,
        "seconds": median([end_of(run).seconds for run in runs]),
        "mb_across": median([sum(end_of(run).interface_bytes) / 1e6 for run in runs]),
        "exchanges": end_of(runs[0]).exchanges,
        "waited_s": median([sum(done.waited_s for done in own) for own in exchanges]),
        "accuracy_percent": sum(accuracies) / len(accuracies),
        "accuracies": [round(accuracy, 2) for accuracy in accuracies],
        "periods": [event.steps for event in chosen[0]],
    }


def _draw(rows: list[dict[str, Any]], file: Path) -> None:
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
