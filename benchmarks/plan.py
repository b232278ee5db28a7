"""Plans against the clock: what was predicted, who waited, and whether any plan made by hand is faster.

On the lab, for five clusters: equal devices; 70/25/5 of a core; one device useless; two nodes with unequal numbers of
ranks and a slow link; one device with little memory. In each the devices and links are measured, a plan is made, and it
runs beside at least six plans made by hand, in turns, a few steps each, round after round; figures are medians, of
several nodes the largest of their medians, as nodes wait for each other only at exchanges, many steps apart. How
long a rank waits is read from its CPU time: one that never waits uses all of its quota.

A prediction is what the plan says before it runs. The speed of a shared machine changes by 20 % within minutes, so
devices are measured again in the middle of the run and after it: what would have been predicted then is told beside it
(`predictions_ms`), and counts for nothing.

Also: unequal batches on 100 % and 30 % of a core beside equal ones, and the accuracy with both; a device that becomes
four times slower in the middle of a run; the time to plan ResNet-152 for 1,024 devices, and to simulate 10,000 nodes.
"""

import argparse
import sys
from pathlib import Path

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._plan.clusters import CASES

ROUNDS = 24
PARTS = ("slowed", "accuracy", "large")  # besides the clusters


def main() -> None:
    """Runs the benchmark, or one rank of it on the lab."""
    arguments = _parse_arguments()
    if arguments.worker:
        from benchmarks._plan.cluster_worker import run_cluster_rank

        name, rounds, folder = arguments.worker
        run_cluster_rank(name, int(rounds), folder)
    elif arguments.slowing:
        from benchmarks._plan.slowed_worker import run_slowed_rank

        run_slowed_rank(*arguments.slowing)
    elif arguments.accuracy:
        from benchmarks._plan.accuracy import run_accuracy_rank

        samples, seed = arguments.accuracy
        run_accuracy_rank(samples, int(seed))
    elif arguments.only in PARTS:
        run_part(arguments.only, save=arguments.save)
    elif arguments.only:
        run_one_cluster(arguments.only, 1 if arguments.quick else arguments.rounds, save=arguments.save)
    else:
        run_all(1 if arguments.quick else arguments.rounds, quick=arguments.quick, save=arguments.save)


def _parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cluster and few rounds, about a minute on two cores")
    parser.add_argument(
        "--save", action="store_true", help="keep the result in benchmarks/results/; with --only its part"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each plan; fewer on a slow machine")
    parser.add_argument("--only", help=f"one part: {', '.join([*CASES, *PARTS])}")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--accuracy", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--slowing", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only and arguments.only not in (*CASES, *PARTS):
        parser.error(f"--only {arguments.only!r} is no part. Give one of: {', '.join([*CASES, *PARTS])}")
    return arguments


def run_all(rounds: int, *, quick: bool, save: bool) -> None:
    """Runs all clusters and parts, or with `quick` a few of them, and reports them."""
    from benchmarks._plan.accuracy import accuracy_row
    from benchmarks._plan.cluster_rows import run_cluster
    from benchmarks._plan.large import large_row, time_large_clusters
    from benchmarks._plan.result import PlanFigures, pad_rows, report
    from benchmarks._plan.slowed import REBALANCED, TIMES, rebalanced_rate

    names = ["equal", "100/30"] if quick else list(CASES)
    rows = [row for name in names for row in run_cluster(name, rounds)]
    slowed = [rebalanced_rate(what, 1 if quick else TIMES) for what in REBALANCED]
    large = time_large_clusters()
    part_rows = [*(row for _, row in slowed), large_row(large)]
    if not quick:
        part_rows.append(accuracy_row())
    rate = min(rate for rate, _ in slowed)
    report(PlanFigures([*rows, *pad_rows(part_rows, rows[0])], large, rate), save=save)


def run_one_cluster(name: str, rounds: int, *, save: bool) -> None:
    """Runs one cluster and reports it; with `save` together with the other rows of the saved result."""
    from benchmarks._plan.cluster_rows import run_cluster
    from benchmarks._plan.result import PlanFigures, join_saved, report

    rows = run_cluster(name, rounds)
    report(join_saved(rows, name) if save else PlanFigures(rows), save=save)


def run_part(part: str, *, save: bool) -> None:
    """Runs a part that is no cluster and reports it together with the other rows of the saved result."""
    from benchmarks._plan.result import join_saved, report

    if part == "accuracy":
        from benchmarks._plan.accuracy import accuracy_row

        report(join_saved([accuracy_row()], part), save=save)
    elif part == "slowed":
        from benchmarks._plan.slowed import REBALANCED, rebalanced_rate

        slowed = [rebalanced_rate(what) for what in REBALANCED]
        figures = join_saved([row for _, row in slowed], part)
        report(figures._replace(rebalanced_rate=min(rate for rate, _ in slowed)), save=save)
    else:
        from benchmarks._plan.large import large_row, time_large_clusters

        large = time_large_clusters()
        report(join_saved([large_row(large)], part)._replace(large=large), save=save)


if __name__ == "__main__":
    main()
