"""Fashion-MNIST to the end: accuracy and time of node-based communications beside the global baseline.

A ResNet of 1.1 million parameters on the lab (2 nodes x 2 ranks, 50 Mbit/s), equal epochs, three seeds, both ways in
turns. The size is chosen so that the wire matters: a step of the baseline sends 1.5 x 4.3 MB from each node. A network
of 0.17 million parameters at 200 Mbit/s would be bound by these cores and would show nothing.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Claim, Row, median, spread, write_result
from benchmarks.recipe_runs import final_accuracy, summary, totals, train, two_node_cluster
from evenly.lab import Lab
from evenly.spec import Run, RunStarted

PERIODS = {"global": "global", "node-based": "8"}  # method to K'
SETTINGS: dict[str, object] = {
    "width": 60,
    "batch_size": 16,
    "epochs": 5,
    "train_limit": 5120,
    "evaluate_every": 0,
    "lr": 0.05,
    "checkpoint_every": "none",
}
QUICK: dict[str, object] = {"epochs": 1, "train_limit": 1024, "test_limit": 1000}


def main() -> None:
    """Trains with both methods in turns and reports them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, little data: figures are not to be kept")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=50.0, help="Mbit/s of each node's link; 0: not shaped")
    arguments = parser.parse_args()
    settings = SETTINGS | (QUICK if arguments.quick else {})
    seeds = 1 if arguments.quick else arguments.seeds
    rate = arguments.rate or None
    runs = run_methods(settings, seeds, rate=rate)
    report(runs, settings, rate=rate, save=arguments.save)


def run_methods(settings: dict[str, object], seeds: int, *, rate: float | None) -> dict[str, list[Run]]:
    """Returns the runs of each method, one for each seed."""
    runs: dict[str, list[Run]] = {method: [] for method in PERIODS}
    with tempfile.TemporaryDirectory() as folder, Lab(two_node_cluster(rate)) as lab:
        for seed in range(seeds):
            for method, period in PERIODS.items():
                run = train(lab, Path(folder) / f"{method}-{seed}", settings | {"every": period, "seed": seed})
                runs[method].append(run)
                print(f"seed {seed}, {method}: {summary(run)}", flush=True)
    return runs


def report(runs: dict[str, list[Run]], settings: dict[str, object], *, rate: float | None, save: bool) -> None:
    """Prints rows and claims as a table and as JSON; with `save` writes them to `results/fashion.json`."""
    pairs = list(zip(runs["node-based"], runs["global"], strict=True))
    differences = [100 * (final_accuracy(ours) - final_accuracy(everywhere)) for ours, everywhere in pairs]
    speedups = [totals(everywhere).seconds / totals(ours).seconds for ours, everywhere in pairs]
    claims = [
        Claim("accuracy_points_minus_global", sum(differences) / len(differences), -0.5, "higher"),
        Claim("speedup_over_global", median(speedups), 2.5, "higher"),
    ]
    parameters = runs["global"][0].of(RunStarted)[0].settings["parameters"]
    note = (
        f"2 nodes x 2 ranks, {rate} Mbit/s, K' = {PERIODS['node-based']}, {parameters} parameters, "
        f"{settings['epochs']} epochs of {settings['train_limit']} images, batch {settings['batch_size']} a rank, "
        f"{len(pairs)} seeds, 10000 test images; seconds run from the first step to the evaluated model."
    )
    rows = [method_row(method, own_runs) for method, own_runs in runs.items()]
    write_result("fashion", rows, claims, note=note, save=save)


def method_row(method: str, runs: list[Run]) -> Row:
    """Returns the medians of a method's runs and the accuracy of each."""
    seconds = [totals(run).seconds for run in runs]
    accuracies = [100 * final_accuracy(run) for run in runs]
    return {
        "method": method,
        "seconds": median(seconds),
        "spread_s": spread(seconds),
        "samples_per_s": median([totals(run).samples_per_s for run in runs]),
        "mb_across": median([sum(totals(run).interface_bytes) / 1e6 for run in runs]),
        "exchanges": totals(runs[0]).exchanges,
        "accuracy_percent": sum(accuracies) / len(accuracies),
        "accuracies": [round(accuracy, 2) for accuracy in accuracies],
    }


if __name__ == "__main__":
    main()
