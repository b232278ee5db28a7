"""Runs the plans of one emulated cluster side by side and returns a row for each."""

import sys
from typing import Any

from benchmarks._plan.clusters import CASES
from benchmarks._plan.lab import Quotas, run_with_quotas
from benchmarks.common import ROW_ORIGIN, Row, median, spread
from evenly.lab import LabNode

SHOWN_PLANS = 6  # the fastest, printed while the benchmark runs


def run_cluster(name: str, rounds: int) -> list[Row]:
    """Returns a row for each plan of a cluster, the chosen one first, and prints the fastest to stderr."""
    case = CASES[name]
    nodes = [LabNode(name=f"n{i}", ranks=len(cpu), rate_mbit=case.rate_mbit) for i, cpu in enumerate(case.cpu)]
    unlimited = [None] * len(case.quotas)
    answers: list[Quotas] = [case.quotas, unlimited, case.quotas, unlimited]
    figures = run_with_quotas(nodes, "--worker", name, str(rounds), answers=answers, timeout_s=3600)
    rows = cluster_rows(name, figures)
    _print_progress(name, rows)
    return rows


def cluster_rows(name: str, figures: dict[str, Any]) -> list[Row]:
    """Returns a row for each plan from the figures of `cluster_worker`, the chosen plan first."""
    rounds_of_chosen = _rounds_of_nodes(name, "chosen", figures)
    return [_plan_row(name, plan, figures, rounds_of_chosen) for plan in figures["samples"]]


def _plan_row(name: str, plan: str, figures: dict[str, Any], rounds_of_chosen: list[list[float]]) -> Row:
    """Returns what one plan was predicted to take, what it took, and how long ranks waited."""
    quotas = CASES[name].quotas
    nodes = _rounds_of_nodes(name, plan, figures)
    predictions = [predicted[plan] for predicted in figures["predicted_s"]]
    step_s = _step_seconds(nodes)
    waits = {
        rank: max(0.0, 1 - median(measured[plan]["cpu_use"]))
        for rank, measured in enumerate(figures["measured"])
        if measured[plan]["step_s"]
    }
    return {
        "cluster": name,
        **ROW_ORIGIN,
        "plan": plan,
        "samples": "/".join(map(str, figures["samples"][plan])),
        "ms_per_step": 1e3 * step_s,
        "ms_spread": spread([1e3 * max(seconds) for seconds in zip(*nodes, strict=True)]),
        "predicted_ms": 1e3 * predictions[0],
        "predictions_ms": [round(1e3 * seconds, 1) for seconds in predictions],
        "chosen_over": _time_ratio(rounds_of_chosen, nodes),
        "prediction_error": predictions[0] / step_s - 1,
        "slowest_waits": waits[min(waits, key=lambda rank: quotas[rank])],
        "most_wait": max(waits.values()),
    }


def _rounds_of_nodes(name: str, plan: str, figures: dict[str, Any]) -> list[list[float]]:
    """Returns the seconds of a step in each round, for each node that takes part.

    A node is as slow as its slowest rank. The time of exchanges is added, spread over the steps of a period.
    """
    exchange_seconds = [seconds for measured in figures["measured"] for seconds in measured[plan]["exchange_s"]]
    exchange_s = median(exchange_seconds) if exchange_seconds else 0.0
    node_of_rank = CASES[name].node_of_rank
    nodes = []
    for node in sorted(set(node_of_rank)):
        rounds_of_ranks = [
            measured[plan]["step_s"]
            for measured, node_of_this in zip(figures["measured"], node_of_rank, strict=True)
            if node_of_this == node and measured[plan]["step_s"]
        ]
        if rounds_of_ranks:
            nodes.append([max(seconds) + exchange_s for seconds in zip(*rounds_of_ranks, strict=True)])
    return nodes


def _step_seconds(nodes: list[list[float]]) -> float:
    """Returns the seconds of a step: the largest of the nodes' medians.

    Nodes wait for each other only at exchanges, many steps apart, so each has a median of its own.
    """
    return max(median(rounds) for rounds in nodes)


def _time_ratio(chosen: list[list[float]], other: list[list[float]]) -> float:
    """Returns the time of the chosen plan over that of another, in the rounds that both ran.

    With one node it is the median over rounds; with several, the ratio of the two steps.
    """
    if len(chosen) == len(other) == 1:
        return median([a / b for a, b in zip(chosen[0], other[0], strict=False)])
    count = min(len(chosen[0]), len(other[0]))
    return _step_seconds([rounds[:count] for rounds in chosen]) / _step_seconds([rounds[:count] for rounds in other])


def _print_progress(name: str, rows: list[Row]) -> None:
    """Prints the fastest plans of a cluster and how the chosen one compares with those by hand."""
    for row in sorted(rows, key=lambda row: row["ms_per_step"])[:SHOWN_PLANS]:
        times = f"{row['ms_per_step']:.0f} ms {row['ms_spread']}, predicted {row['predictions_ms']}"
        print(f"{name}: {row['plan']} {row['samples']} {times}", file=sys.stderr, flush=True)
    ratio = max(row["chosen_over"] for row in rows[1:])
    error = rows[0]["prediction_error"]
    print(f"{name}: {ratio:.3f} times the best by hand, predicted {error:+.1%}", file=sys.stderr, flush=True)
