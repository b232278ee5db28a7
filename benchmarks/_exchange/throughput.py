"""The parts of `exchange.py --full` that time steps: all methods in turns, and hivemind after the others."""

import sys
from collections.abc import Sequence

from benchmarks._exchange.lab import PEERS_PYTHON, Figures, run_methods
from benchmarks._exchange.method import PERIOD
from benchmarks._exchange.methods import SLOW
from benchmarks._exchange.parts import Slice
from benchmarks.common import Claim, Row, median, spread
from evenly import EvenlyError

CASES = (((2, 2), 200.0), ((2, 2), 50.0), ((3, 1), 200.0), ((3, 1), 50.0))  # ranks of the nodes, Mbit/s
LIMIT = "no exchange"
SILENT = "no communication at all"  # also inside nodes


def throughput_part(rounds: int, steps: int, batch_size: int) -> Slice:
    """Returns the rows of all methods on all links and nodes, and the claims about them."""
    rows: list[Row] = []
    for node_ranks, rate in CASES:
        figures = run_methods(node_ranks, rate, rounds=rounds, steps=steps, method_set="full", batch_size=batch_size)
        rows += [{"part": "throughput", **row} for row in compare_with_limit(figures, node_ranks, rate, steps)]
    return rows, throughput_claims(rows)


def hivemind_part(rounds: int, steps: int, batch_size: int) -> Slice:
    """Returns the rows of hivemind, its limit and one of our forms, and how much faster ours is.

    Hivemind goes on in the turns of others, so here methods run one after another. A case in which it is not installed
    or does not end is left out.
    """
    rows: list[Row] = []
    ratios = []
    for node_ranks, rate in CASES if PEERS_PYTHON.exists() else ():
        try:
            figures = run_methods(
                node_ranks, rate, rounds=rounds, steps=steps, method_set="apart", batch_size=batch_size
            )
        except EvenlyError as error:
            print(f"left out: {error}", file=sys.stderr, flush=True)
            continue
        case_rows = compare_with_limit(figures, node_ranks, rate, steps)
        throughput = {row["method"]: row["throughput_over_limit"] for row in case_rows}
        if "hivemind" in throughput:
            rows += [{"part": "hivemind", **row} for row in case_rows]
            if rate == 50.0:
                ratios.append(throughput["evenly, fp32"] / throughput["hivemind"])
    claims = [Claim("throughput_over_hivemind_50mbit", min(ratios), 1.25, "higher")] if ratios else []
    return rows, claims


def compare_with_limit(figures: Figures, node_ranks: tuple[int, ...], rate: float, steps: int) -> list[Row]:
    """Returns a row for each method of one run, with its throughput over that without exchanges."""
    limit_seconds = figures["methods"][LIMIT]["seconds"]
    rows = []
    for name, method in figures["methods"].items():
        round_steps = PERIOD if name in SLOW else steps
        ratios = [limit / seconds for limit, seconds in zip(limit_seconds, method["seconds"], strict=True)]
        step_bytes = median([sum(sent) / round_steps for sent in method["sent"]])
        rows.append(
            {
                "nodes": " + ".join(map(str, node_ranks)),
                "mbit_per_s": rate,
                "method": name,
                "batch": figures["batch"],
                "ms_per_step": 1e3 * median(method["seconds"]),
                "spread_ms": spread([1e3 * seconds for seconds in method["seconds"]]),
                "throughput_over_limit": median(ratios),
                "times_model_size_per_step": step_bytes / figures["parameter_bytes"],
                "versions": figures["versions"],
            }
        )
    return rows


def throughput_claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns the claims about throughput, of the worse of both kinds of nodes, and about the bytes of each codec."""
    fast_link = _throughputs(rows, 200.0)
    slow_link = _throughputs(rows, 50.0)
    over_peers = [_best_of_ours(throughput) / _best_of_peers(throughput) for throughput in slow_link]
    over_silent = [_best_of_ours(throughput) / throughput[SILENT] for throughput in slow_link]
    ddp = max(throughput["global DDP"] for throughput in slow_link)
    sent = {
        row["method"]: row["times_model_size_per_step"]
        for row in rows
        if row["nodes"] == "2 + 2" and row["mbit_per_s"] == 200.0
    }
    return [
        Claim("throughput_over_limit_200mbit", min(map(_best_of_ours, fast_link)), 0.95, "higher"),
        Claim("throughput_over_limit_50mbit", min(map(_best_of_ours, slow_link)), 0.90, "higher"),
        Claim("throughput_over_best_peer_50mbit", min(over_peers), 1.25, "higher"),
        Claim("throughput_over_no_communication_50mbit", min(over_silent), 0.85, "higher"),
        Claim("bytes_fp32_per_step", sent["evenly, fp32"], 0.27, "lower"),
        Claim("bytes_bf16_per_step", sent["evenly, bf16"], 0.14, "lower"),
        Claim("bytes_int8_per_step", sent["evenly, int8"], 0.075, "lower"),
        Claim("bytes_int4_per_step", sent["evenly, int4"], 0.042, "lower"),
        Claim("ddp_over_limit_50mbit", ddp, 0.25, "lower"),
    ]


def _throughputs(rows: Sequence[Row], rate: float) -> list[dict[str, float]]:
    """Returns the throughput over the limit by method, for each kind of nodes, on links of this rate."""
    by_nodes: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["mbit_per_s"] == rate:
            by_nodes.setdefault(row["nodes"], {})[row["method"]] = row["throughput_over_limit"]
    return list(by_nodes.values())


def _best_of_ours(throughput: dict[str, float]) -> float:
    """Returns the throughput of our fastest form."""
    return max(value for name, value in throughput.items() if name.startswith("evenly"))


def _best_of_peers(throughput: dict[str, float]) -> float:
    """Returns the throughput of the fastest method that is neither ours nor a limit."""
    limits = (LIMIT, SILENT)
    return max(value for name, value in throughput.items() if name not in limits and not name.startswith("evenly"))
