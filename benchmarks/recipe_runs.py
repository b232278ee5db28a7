"""Trains the Fashion-MNIST recipe on an emulated cluster and reads its record."""

import sys
from collections.abc import Mapping
from pathlib import Path

from evenly.lab import Lab, LabCluster, LabNode
from evenly.spec import Run, RunFinished


def two_node_cluster(rate_mbit: float | None) -> LabCluster:
    """Returns two nodes of two ranks with links of so many Mbit/s; None: not shaped."""
    return LabCluster(nodes=tuple(LabNode(name=f"node{i}", ranks=2, rate_mbit=rate_mbit) for i in range(2)))


def train(lab: Lab, folder: Path, settings: Mapping[str, object]) -> Run:
    """Returns the record of one training run on the lab."""
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "evenly", "train", "fashion", "--run", str(folder), *options]
    lab.run(command, output="capture", timeout_s=3600).check()
    return Run.read(folder)


def totals(run: Run) -> RunFinished:
    """Returns the totals of a run; ends the program where it did not finish."""
    finished = run.last(RunFinished)
    if finished is None:
        raise SystemExit("a run did not finish")
    return finished


def final_accuracy(run: Run) -> float:
    """Returns the accuracy of the final model."""
    return float(run.latest_values()["accuracy"] or 0.0)


def summary(run: Run) -> str:
    """Returns seconds and accuracy of a run in words."""
    return f"{totals(run).seconds:.1f} s, {100 * final_accuracy(run):.2f} %"
