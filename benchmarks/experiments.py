"""Keeps the results of `evenly experiment` in benchmarks/results/, with claims.

Give the folders of one experiment: `evenly experiment cifar --to runs/cifar`, then
`python benchmarks/experiments.py cifar runs/cifar --save`. Runs that were kept before stay, unless a folder has them
again, so that a long grid can be run on several days.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import COMMIT, RESULTS_DIR, Claim, Row, write_result
from evenly.recipes.experiments import (
    Experiment,
    GroupRow,
    Outcome,
    PlannedRun,
    group_rows,
    load_experiment,
    markdown,
    planned_runs,
    read_outcome,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes" / "results.md"
NOTE = (
    "One row for each run: its last figures, the median time of an epoch, megabytes that all ranks sent across nodes "
    "(of the global way: averaged gradients), and the compared figure after each epoch. All nodes share one device and "
    "talk through its machine's loopback, beside other runs: times show an order, not what a cluster would take."
)


def main() -> None:
    """Reads the folders, joins them with what is kept, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the experiment")
    parser.add_argument("folders", nargs="*", type=Path, help="of `evenly experiment --to`")
    parser.add_argument("--set", action="append", default=[], help="as it was given to `evenly experiment`")
    parser.add_argument("--made-by", default="", help="the command that made the runs, to be kept with them")
    parser.add_argument("--commit", default=COMMIT, help="the commit that made the runs, if it is not this one")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    arguments = parser.parse_args()
    experiment = load_experiment(arguments.name)
    runs = planned_runs(experiment, changes=arguments.set)
    made_by = arguments.made_by or f"evenly experiment {arguments.name}"
    rows = {(row["run"], row["seed"]): row for row in kept_rows(arguments.name)}
    for folder in arguments.folders:
        for run in runs:
            row = read_row(folder, run, experiment, origin={"made_by": made_by, "commit": arguments.commit})
            if row is not None:
                rows[run.name, run.seed] = row
    known = [(run, rows[run.name, run.seed]) for run in runs if (run.name, run.seed) in rows]
    if not known:
        raise SystemExit("no run is complete")
    groups = group_rows(experiment, {run: outcome_of(row) for run, row in known})
    claims = CLAIMS[arguments.name](groups) if arguments.name in CLAIMS else []
    shown = [shown_row(group) for group in groups]
    kept = [row for _, row in known]
    write_result(f"experiment_{arguments.name}", kept, claims, note=NOTE, save=arguments.save, shown=shown)
    if arguments.save:
        write_table(arguments.name, experiment, groups)


def kept_rows(name: str) -> list[Row]:
    """Returns the rows that are kept of an experiment."""
    file = RESULTS_DIR / f"experiment_{name}.json"
    return list(json.loads(file.read_text())["rows"]) if file.is_file() else []


def read_row(folder: Path, run: PlannedRun, experiment: Experiment, *, origin: Mapping[str, str]) -> Row | None:
    """Returns a run as a row, or None if it is not complete."""
    outcome = read_outcome(folder / run.folder)
    if outcome is None:
        return None
    return {
        "run": run.name,
        "seed": run.seed,
        "figures": {name: round(value, 5) for name, value in outcome.figures.items()},
        "epochs": len(outcome.curve),
        "epoch_s": round(outcome.epoch_s, 3),
        "sent_mb": round(outcome.sent_bytes / 1e6, 1),
        "curve": [round(point[experiment.metric], 5) for point in outcome.curve if experiment.metric in point],
        "devices": ", ".join(sorted(set(outcome.devices))),
        "torch": outcome.torch,
        **origin,
    }


def outcome_of(row: Row) -> Outcome:
    """Returns a row as an outcome, to be grouped."""
    return Outcome(row["figures"], epoch_s=row["epoch_s"], sent_bytes=round(1e6 * row["sent_mb"]))


def shown_row(group: GroupRow) -> Row:
    """Returns a kind of runs as a line of the printed table."""
    return {
        "run": group.name,
        "seeds": len(group.seeds),
        "mean": group.mean,
        "deviation": group.deviation,
        "minus_baseline": group.difference,
        "interval": group.interval,
        "epoch_s": group.epoch_s,
        "sent_mb": group.sent_bytes / 1e6,
    }


def write_table(name: str, experiment: Experiment, groups: Sequence[GroupRow]) -> None:
    """Writes the table into its place on the page of results."""
    text = PAGE.read_text()
    begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
    before, _, rest = text.partition(begin)
    if not rest:
        raise SystemExit(f"{PAGE} has no line {begin.strip()} for the table")
    PAGE.write_text(f"{before}{begin}\n{markdown(experiment, groups)}\n{end}{rest.partition(end)[2]}")


def points_minus_global(groups: Sequence[GroupRow], every: str) -> float:
    """Returns the mean of all paired differences in percentage points, over all nodes and seeds."""
    baselines = {
        (group.cells["nodes"], seed): value
        for group in globals_of(groups)
        for seed, value in zip(group.seeds, group.values, strict=True)
    }
    differences = [
        value - baselines[group.cells["nodes"], seed]
        for group in groups
        if group.cells["every"] == every
        for seed, value in zip(group.seeds, group.values, strict=True)
        if (group.cells["nodes"], seed) in baselines
    ]
    return round(100 * mean(differences), 3)


def globals_of(groups: Sequence[GroupRow]) -> list[GroupRow]:
    """Returns the kinds of runs that average gradients globally."""
    return [group for group in groups if group.cells["every"] == "global"]


def cifar_claims(groups: Sequence[GroupRow]) -> list[Claim]:
    """Accuracy is kept by node-based communications, and the recipe is as good as usual."""
    claims = [
        Claim(f"cifar_points_minus_global_{name}", points_minus_global(groups, every), 0.0, "higher")
        for name, every in (("k10", "10"), ("k50", "50"), ("epoch", "epoch"))
    ]
    return [*claims, Claim("cifar_accuracy_global", min(group.mean for group in globals_of(groups)), 0.94, "higher")]


def rnn_claims(groups: Sequence[GroupRow]) -> list[Claim]:
    """The LSTM reads digits."""
    return [Claim("rnn_accuracy", min(group.mean for group in groups), 0.98, "higher")]


CLAIMS = {"cifar": cifar_claims, "rnn": rnn_claims}

if __name__ == "__main__":
    main()
