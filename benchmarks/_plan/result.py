"""The result of `plan.py`: rows of this run, joined with those saved before, and the claims about them."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks._plan.clusters import BATCH_SIZE, BATCHES_BY_SPEED, EQUAL_BATCHES, UNEVEN
from benchmarks._plan.large import LargeTimes
from benchmarks.common import RESULTS_DIR, ROW_ORIGIN, Claim, Row, write_result


class PlanFigures(NamedTuple):
    """All rows, the times of `large` and the rate of `slowed`; None where that part did not run."""

    rows: list[Row]
    large: LargeTimes | None = None
    rebalanced_rate: float | None = None


def pad_rows(rows: Sequence[Row], columns: Row) -> list[Row]:
    """Returns the rows with all columns of another row; those that a row does not have are None."""
    return [{**dict.fromkeys(columns), **row} for row in rows]


def join_saved(rows: Sequence[Row], part: str) -> PlanFigures:
    """Returns the saved result with the rows of one part replaced; each row has the commit that it was run at."""
    saved = json.loads((RESULTS_DIR / "plan.json").read_text())
    origin = {"commit": saved["commit"], "architecture": saved["machine"]["architecture"]}
    saved_rows: list[Row] = [{**origin, **row} for row in saved["rows"]]
    is_of_part = [row["cluster"].split(",")[0] == part for row in saved_rows]
    place = is_of_part.index(True) if any(is_of_part) else len(saved_rows)
    others = [row for row, replaced in zip(saved_rows, is_of_part, strict=True) if not replaced]
    new_rows = pad_rows([{**ROW_ORIGIN, **row} for row in rows], saved_rows[0])
    values = {claim["name"]: claim["value"] for claim in saved["claims"]}
    return PlanFigures(
        rows=[*others[:place], *new_rows, *others[place:]],
        large=LargeTimes(values["plan_resnet152_1024_devices_s"], values["simulate_10000_nodes_1000_steps_s"]),
        rebalanced_rate=values["rebalanced_rate_over_possible"],
    )


def report(figures: PlanFigures, *, save: bool) -> None:
    """Prints rows and claims as a table and as JSON; with `save` writes them to `results/plan.json`."""
    claims = [*_plan_claims(figures.rows), *_part_claims(figures), *_uneven_batch_claims(figures.rows)]
    note = f"Global batch of {BATCH_SIZE}; quotas of a core, ranks on loopback or shaped links."
    write_result("plan", figures.rows, claims, note=note, save=save)


def _plan_claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns the claims about chosen plans: prediction, waiting, and the best plan by hand.

    The cluster with unequal batches has a claim of its own, so it counts here only if no other was run.
    """
    chosen: dict[str, dict[str, Any]] = {row["cluster"]: row for row in rows if row["plan"] == "chosen"}
    if len(chosen) > 1:
        chosen.pop(UNEVEN, None)
    ratios = [row["chosen_over"] for row in rows if row["cluster"] in chosen and row["plan"] != "chosen"]
    return [
        Claim("worst_prediction_error", max(abs(row["prediction_error"]) for row in chosen.values()), 0.1, "lower"),
        Claim("worst_wait_fraction", max(row["slowest_waits"] for row in chosen.values()), 0.1, "lower"),
        Claim("worst_chosen_over_best_alternative", max(ratios), 1.03, "lower"),
    ]


def _part_claims(figures: PlanFigures) -> list[Claim]:
    """Returns the claims about large clusters and rebalancing, if both were measured."""
    if figures.large is None or figures.rebalanced_rate is None:
        return []
    return [
        Claim("plan_resnet152_1024_devices_s", figures.large.plan_s, 2.0, "lower"),
        Claim("simulate_10000_nodes_1000_steps_s", figures.large.simulate_s, 10.0, "lower"),
        Claim("rebalanced_rate_over_possible", figures.rebalanced_rate, 0.85, "higher"),
    ]


def _uneven_batch_claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns how much faster batches by speed are than equal ones, if that cluster was run."""
    ratios = {row["plan"]: row["chosen_over"] for row in rows if row["cluster"] == UNEVEN}
    if not ratios:
        return []
    speedup = ratios.get(BATCHES_BY_SPEED, 1.0) / ratios[EQUAL_BATCHES]  # missing: the chosen plan has these batches
    return [Claim("uneven_batch_speedup_100_30", speedup, 1.8, "higher")]
