"""Runs the parts of `exchange.py --full`, or one of them."""

from collections.abc import Callable

from benchmarks._exchange.lab import busy_batch_size
from benchmarks._exchange.method import PERIOD
from benchmarks._exchange.parts import PARTS, Slice
from benchmarks._exchange.saved import report_parts, saved_parts
from benchmarks._exchange.throughput import hivemind_part, throughput_part
from benchmarks._exchange.training import accuracy_part, adaptive_part, sweep_part
from benchmarks.common import ROW_ORIGIN


def run_full(only: str | None, *, seeds: int, quick: bool, save: bool) -> None:
    """Runs all parts, or `only` one, and reports after each; with `save` the other parts stay as they were saved."""
    measure = _measures(seeds=1 if quick else seeds, quick=quick)
    parts = [only] if only else list(PARTS)
    rows, claims = saved_parts([part for part in PARTS if part not in parts]) if save else ([], [])
    for part in parts:
        part_rows, part_claims = measure[part]()
        if not part_rows and save:  # it could not run here, so its saved rows stay
            part_rows, part_claims = saved_parts([part])
        rows += [{**ROW_ORIGIN, **row} for row in part_rows]
        claims += part_claims
        report_parts(rows, claims, save=save)


def _measures(*, seeds: int, quick: bool) -> dict[str, Callable[[], Slice]]:
    """Returns the function that measures each part, by name."""
    rounds, steps = (1, 2 * PERIOD) if quick else (8, 2 * PERIOD)
    return {
        "throughput": lambda: throughput_part(rounds, steps, busy_batch_size()),
        "accuracy": lambda: accuracy_part(seeds, quick=quick),
        "adaptive": lambda: adaptive_part(seeds, quick=quick),
        "hivemind": lambda: hivemind_part(1 if quick else 3, 2 * PERIOD, busy_batch_size()),
        "sweep": lambda: sweep_part(1, quick=quick),
    }
