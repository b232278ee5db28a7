"""What an exchange beside the training costs on a GPU: two nodes of one process each on one device, over gloo.

Steps without exchanges and steps with overlapped ones are made in turns by both processes at the same time, round after
round; figures are medians. A profile of some steps counts the calls that wait for the whole device.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Claim, Row, median, spread, write_result
from benchmarks.local_ranks import run_ranks

PERIOD = 20
OVERLAP = 10
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"overlap": OVERLAP},
    "bf16": {"overlap": OVERLAP, "codec": "bf16"},
    "int8": {"overlap": OVERLAP, "codec": "int8"},
    "int4, 4 fragments": {"overlap": OVERLAP // 2, "codec": "int4", "fragments": 4},
    "fp32, waited for": {},
}


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--batch", type=int, default=512, help="samples of each process")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        from benchmarks._exchange.cuda_worker import run_cuda_rank

        run_cuda_rank(arguments.worker, arguments.batch, PERIOD, FORMS)
        return
    rounds = 4 if arguments.quick else 12
    options = ["--worker", str(rounds), "--batch", str(arguments.batch)]
    variables = [{"LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}] * 2
    figures = run_ranks(__file__, *options, variables=variables, timeout_s=540)
    report(figures, rounds, arguments.batch, save=arguments.save)


def report(figures: dict[str, Any], rounds: int, batch_size: int, *, save: bool) -> None:
    """Prints rows and claims as a table and as JSON; with `save` writes them to `results/exchange_cuda.json`."""
    limit_seconds = figures["no exchange"]["step_s"]
    rows = [form_row(name, form_figures, limit_seconds) for name, form_figures in figures.items()]
    overlapped = [row for row in rows if FORMS.get(row["method"])]
    cost = max(row["over_no_exchange"] for row in overlapped) - 1
    waits = max(row["cudaDeviceSynchronize_per_period"] for row in overlapped)
    claims = [
        Claim("overlapped_exchange_cost_of_step", cost, 0.02, "lower"),
        Claim("device_synchronisations", waits, 0, "lower"),
    ]
    note = (
        f"Two processes on one GPU, batch {batch_size} each, K' = {PERIOD}, overlap {OVERLAP} steps, "
        f"{rounds} rounds of {2 * PERIOD} steps in turns."
    )
    write_result("exchange_cuda", rows, claims, note=note, save=save)


def form_row(name: str, figures: dict[str, Any], limit_seconds: list[float]) -> Row:
    """Returns step time, exchange time and waits of one form; `limit_seconds` are the steps without exchanges."""
    ratios = [seconds / limit for seconds, limit in zip(figures["step_s"], limit_seconds, strict=True)]
    return {
        "method": name,
        "ms_per_step": 1e3 * median(figures["step_s"]),
        "spread_ms": spread([1e3 * seconds for seconds in figures["step_s"]]),
        "over_no_exchange": median(ratios),
        "exchange_ms": 1e3 * median(figures["exchange_s"]) if figures["exchange_s"] else None,
        "waited_ms": 1e3 * median(figures["waited_s"]) if figures["waited_s"] else None,
        **{f"{call}_per_period": count for call, count in figures["device_waits"].items()},
    }


if __name__ == "__main__":
    main()
