"""Fashion-MNIST to the end: accuracy and time of node-based communications beside the global baseline.

A ResNet of 1.1 million parameters on the lab (2 nodes x 2 ranks, 50 Mbit/s), equal epochs, three seeds, both ways in
turns. The size is chosen so that the wire matters: a step of the baseline sends 1.5 x 4.3 MB from each node. A network
of 0.17 million parameters at 200 Mbit/s would be bound by these cores and would show nothing.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Claim, median, spread, write_result
from evenly.lab import Lab, LabCluster, LabNode
from evenly.spec import Run, RunFinished

WAYS = {"global": "global", "node-based": "8"}


def train(lab: Lab, folder: Path, settings: dict[str, object]) -> Run:
    """Returns the record of one training run on the lab."""
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "evenly", "train", "fashion", "--run", str(folder), *changes]
    lab.run(command, output="capture", timeout_s=3600).check()
    return Run.read(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, little data: figures are not to be kept")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=50.0, help="Mbit/s of each node's link; 0: not shaped")
    arguments = parser.parse_args()
    settings: dict[str, object] = {
        "width": 60, "batch_size": 16, "epochs": 5, "train_limit": 5120, "evaluate_every": 0, "lr": 0.05,
        "checkpoint_every": "none",
    }  # fmt: skip
    seeds = arguments.seeds
    if arguments.quick:
        settings |= {"epochs": 1, "train_limit": 1024, "test_limit": 1000}
        seeds = 1
    rate = arguments.rate or None
    cluster = LabCluster(nodes=tuple(LabNode(name=f"node{i}", ranks=2, rate_mbit=rate) for i in range(2)))
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, Lab(cluster) as lab:
        for seed in range(seeds):
            for way, every in WAYS.items():
                run = train(lab, Path(folder) / f"{way}-{seed}", settings | {"every": every, "seed": seed})
                runs[way].append(run)
                print(f"seed {seed}, {way}: {_line(run)}", flush=True)
    report(runs, settings, rate=rate, save=arguments.save)


def report(runs: dict[str, list[Run]], settings: dict[str, object], *, rate: float | None, save: bool) -> None:
    rows = []
    for way, mine in runs.items():
        seconds = [end_of(run).seconds for run in mine]
        accuracies = [100 * accuracy_of(run) for run in mine]
        rows.append(
            {
                "method": way,
                "seconds": median(seconds),
                "spread_s": spread(seconds),
                "samples_per_s": median([end_of(run).samples_per_s for run in mine]),
                "mb_across": median([sum(end_of(run).interface_bytes) / 1e6 for run in mine]),
                "exchanges": end_of(mine[0]).exchanges,
                "accuracy_percent": sum(accuracies) / len(accuracies),
                "accuracies": [round(accuracy, 2) for accuracy in accuracies],
            }
        )
    everywhere, ours = runs["global"], runs["node-based"]
    pairs = list(zip(ours, everywhere, strict=True))
    claims = [
        Claim(
            "accuracy_points_minus_global",
            sum(100 * (accuracy_of(a) - accuracy_of(b)) for a, b in pairs) / len(pairs),
            -0.5,
            "higher",
        ),
        Claim("speedup_over_global", median([end_of(b).seconds / end_of(a).seconds for a, b in pairs]), 2.5, "higher"),
    ]
    parameters = runs["global"][0].events[0].settings["parameters"]
    note = (
        f"2 nodes x 2 ranks, {rate} Mbit/s, K' = {WAYS['node-based']}, {parameters} parameters, "
        f"{settings['epochs']} epochs of {settings['train_limit']} images, batch {settings['batch_size']} a rank, "
        f"{len(ours)} seeds, 10000 test images; seconds run from the first step to the evaluated model."
    )
    write_result("fashion", rows, claims, note=note, save=save)


def end_of(run: Run) -> RunFinished:
    """Returns the totals of a run."""
    found = run.last(RunFinished)
    if found is None:
        raise SystemExit("a run did not finish")
    return found


def accuracy_of(run: Run) -> float:
    """Returns the accuracy of the final model."""
    return float(run.latest_values()["accuracy"] or 0.0)


def _line(run: Run) -> str:
    return f"{end_of(run).seconds:.1f} s, {100 * accuracy_of(run):.2f} %"


if __name__ == "__main__":
    main()
