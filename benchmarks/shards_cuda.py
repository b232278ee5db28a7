"""Layers cut over unequal CUDA devices: three processes on one GPU, made unequal with CUDA MPS, beside one alone.

Each process may use a percentage of the GPU's multiprocessors (70/25/5 or 50/30/20). Speeds are not the percentages, so
"ours" takes shares from a short measurement of each process, all running together; "typed" takes the percentages;
"ours, planned" is what the planner makes of its own measurement, which may leave ranks out. Ranks talk through memory
of the GPU, since NCCL refuses several ranks on one. "ideal" adds up the speeds of all processes.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import RESULTS_DIR, ROW_ORIGIN, Claim, Row, median, spread, write_result
from benchmarks.local_ranks import run_ranks
from benchmarks.mps import mps_server, rank_variables

BATCH_SIZES = {"cifar": 512, "wide": 2048}  # by network
PERCENTAGES = ("70/25/5", "50/30/20")  # of the GPU's multiprocessors
CASES = {f"{network} {percent}": (network, percent) for network in BATCH_SIZES for percent in PERCENTAGES}


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--save", action="store_true", help="keep the result; cases not run keep their rows")
    parser.add_argument("--worker", nargs=4, metavar=("NET", "BATCH", "ROUNDS", "PERCENT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        from benchmarks._shards.cuda_worker import run_cuda_rank

        name, batch_size, rounds, percent = arguments.worker
        run_cuda_rank(name, int(batch_size), int(rounds), [float(share) for share in percent.split("/")])
        return
    rows = saved_rows() if arguments.save else []
    with mps_server() as folder:
        for case in arguments.only or CASES:
            network, percent = CASES[case]
            figures = run_network(network, 2 if arguments.quick else 6, percent, folder)
            rows = [row for row in rows if (row["network"], row["percent"]) != (network, percent)]
            rows += network_rows(network, percent, figures)
            report(rows, save=arguments.save)


def saved_rows() -> list[Row]:
    """Returns the rows of the kept result."""
    file = RESULTS_DIR / "shards_cuda.json"
    return list(json.loads(file.read_text())["rows"]) if file.exists() else []


def run_network(name: str, rounds: int, percent: str, folder: str) -> dict[str, Any]:
    """Returns what rank 0 prints; an MPS server must listen in `folder`."""
    variables = [rank_variables(folder, int(share)) for share in percent.split("/")]
    options = ["--worker", name, str(BATCH_SIZES[name]), str(rounds), percent]
    figures: dict[str, Any] = run_ranks(__file__, *options, variables=variables, timeout_s=400)
    return figures


def network_rows(name: str, percent: str, figures: dict[str, Any]) -> list[Row]:
    """Returns a row for each method of one network."""
    alone_s = median(figures["seconds"]["largest alone"])
    return [
        {
            "network": name,
            "percent": percent,
            "way": method,
            "ms_per_step": 1e3 * median(seconds),
            "spread_ms": spread([1e3 * value for value in seconds]),
            "samples_per_s": BATCH_SIZES[name] / median(seconds),
            "speedup_over_largest_alone": alone_s / median(seconds),
            "measured_speeds": "/".join(f"{speed:.1f}" for speed in figures["speeds"]),
            **ROW_ORIGIN,
        }
        for method, seconds in [
            *figures["seconds"].items(),
            ("ideal", [alone_s * figures["speeds"][0] / sum(figures["speeds"])]),
        ]
    ]


def report(rows: Sequence[Row], *, save: bool) -> None:
    """Prints rows and claims as a table and as JSON; with `save` writes them to `results/shards_cuda.json`."""
    step_ms = {(row["network"], row["percent"], row["way"]): row["ms_per_step"] for row in rows}
    measured = {key[:2] for key in step_ms}

    def over_largest_alone(network: str, percent: str) -> float:
        ours = min(step_ms[network, percent, way] for way in ("ours", "ours, planned"))
        return step_ms[network, percent, "largest alone"] / ours

    def over_even(network: str, percent: str) -> float:
        return step_ms[network, percent, "even"] / step_ms[network, percent, "ours"]

    claims = [
        Claim(name, figure(network, percent), bar, "higher")
        for name, figure, network, percent, bar in (
            ("mps_50_30_20_wide_over_largest_alone", over_largest_alone, "wide", "50/30/20", 1.5),
            ("mps_70_25_5_published_over_largest_alone", over_largest_alone, "cifar", "70/25/5", 1.15),
            ("mps_50_30_20_published_over_largest_alone", over_largest_alone, "cifar", "50/30/20", 1.3),
            ("speedup_over_even_70_25_5_cuda", over_even, "cifar", "70/25/5", 1.0),
            ("speedup_over_even_wide_50_30_20_cuda", over_even, "wide", "50/30/20", 1.0),
        )
        if (network, percent) in measured
    ]
    note = "Ranks share one GPU and talk through its memory; speeds measured with all processes running together."
    shown = [{key: row[key] for key in row if key not in ROW_ORIGIN} for row in rows]
    write_result("shards_cuda", rows, claims, note=note, save=save, shown=shown)


if __name__ == "__main__":
    main()
