"""Layers cut over unequal CUDA devices: three processes on one GPU, made unequal with CUDA MPS, beside one alone.

Each process may use a percentage of the GPU's multiprocessors (70/25/5 or 50/30/20). Speeds are not the percentages, so
"ours" takes shares from a short measurement of each process, all running together; "typed" takes the percentages;
"ours, planned" is what the planner makes of its own measurement, which may leave ranks out. Ranks talk through memory
of the GPU, since NCCL refuses several ranks on one. "ideal" adds up the speeds of all processes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Claim, Row, median, spread, write_result
from benchmarks.local_ranks import run_ranks
from benchmarks.mps import mps_server, rank_variables

BATCH_SIZES = {"cifar": 512, "wide": 2048}  # by network
PERCENTAGES = ((70, 25, 5), (50, 30, 20))  # of the GPU's multiprocessors


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--worker", nargs=4, metavar=("NET", "BATCH", "ROUNDS", "PERCENT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        from benchmarks._shards.cuda_worker import run_cuda_rank

        name, batch_size, rounds, percent = arguments.worker
        run_cuda_rank(name, int(batch_size), int(rounds), [float(share) for share in percent.split(",")])
        return
    report(run_all(2 if arguments.quick else 6), save=arguments.save)


def run_all(rounds: int) -> list[Row]:
    """Returns the rows of both networks with both lists of percentages, under an MPS server of their own."""
    rows = []
    with mps_server() as folder:
        for name, batch_size in BATCH_SIZES.items():
            for percent in PERCENTAGES:
                figures = run_network(name, batch_size, rounds, percent, folder)
                rows += network_rows(name, batch_size, percent, figures)
    return rows


def run_network(name: str, batch_size: int, rounds: int, percent: Sequence[int], folder: str) -> dict[str, Any]:
    """Returns what rank 0 prints; an MPS server must listen in `folder`."""
    variables = [rank_variables(folder, share) for share in percent]
    options = ["--worker", name, str(batch_size), str(rounds), ",".join(map(str, percent))]
    figures: dict[str, Any] = run_ranks(__file__, *options, variables=variables, timeout_s=400)
    return figures


def network_rows(name: str, batch_size: int, percent: Sequence[int], figures: dict[str, Any]) -> list[Row]:
    """Returns a row for each method of one network."""
    alone_s = median(figures["seconds"]["largest alone"])
    return [
        {
            "network": name,
            "percent": "/".join(map(str, percent)),
            "way": method,
            "ms_per_step": 1e3 * median(seconds),
            "spread_ms": spread([1e3 * value for value in seconds]),
            "samples_per_s": batch_size / median(seconds),
            "speedup_over_largest_alone": alone_s / median(seconds),
            "measured_speeds": "/".join(f"{speed:.1f}" for speed in figures["speeds"]),
        }
        for method, seconds in [
            *figures["seconds"].items(),
            ("ideal", [alone_s * figures["speeds"][0] / sum(figures["speeds"])]),
        ]
    ]


def report(rows: Sequence[Row], *, save: bool) -> None:
    """Prints rows and claims as a table and as JSON; with `save` writes them to `results/shards_cuda.json`."""
    step_ms = {(row["network"], row["percent"], row["way"]): row["ms_per_step"] for row in rows}

    def over_largest_alone(network: str, percent: str) -> float:
        ours = min(step_ms[network, percent, way] for way in ("ours", "ours, planned"))
        return step_ms[network, percent, "largest alone"] / ours

    uneven = step_ms["cifar", "70/25/5", "even"] / step_ms["cifar", "70/25/5", "ours"]
    wide = step_ms["wide", "50/30/20", "even"] / step_ms["wide", "50/30/20", "ours"]
    claims = [
        Claim("mps_50_30_20_wide_over_largest_alone", over_largest_alone("wide", "50/30/20"), 1.5, "higher"),
        Claim("mps_70_25_5_published_over_largest_alone", over_largest_alone("cifar", "70/25/5"), 1.15, "higher"),
        Claim("mps_50_30_20_published_over_largest_alone", over_largest_alone("cifar", "50/30/20"), 1.3, "higher"),
        Claim("speedup_over_even_70_25_5_cuda", uneven, 1.0, "higher"),
        Claim("speedup_over_even_wide_50_30_20_cuda", wide, 1.0, "higher"),
    ]
    note = "Ranks share one GPU and talk through its memory; speeds measured with all processes running together."
    write_result("shards_cuda", rows, claims, note=note, save=save)


if __name__ == "__main__":
    main()
