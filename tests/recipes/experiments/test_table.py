"""Mean and deviation over seeds, and the paired difference to the baseline."""

import json
import math

import pytest

from evenly.recipes.experiments import Experiment, Outcome, group_rows, planned_runs, row_cells, write_results
from evenly.recipes.experiments.table import half_interval

EXPERIMENT = Experiment(recipe="fashion", seeds=3, grid={"every": ("global", "10")})
ACCURACIES = {("global", 0): 0.90, ("global", 1): 0.92, ("global", 2): 0.94}
ACCURACIES |= {("10", 0): 0.91, ("10", 1): 0.94, ("10", 2): 0.94}


def outcomes(accuracies=ACCURACIES):
    runs = planned_runs(EXPERIMENT)
    return {
        run: Outcome({"accuracy": accuracies[key]}, epoch_s=2.0, sent_bytes=3_000_000)
        for run in runs
        if (key := (run.config.every, run.seed)) in accuracies
    }


def test_mean_deviation_and_paired_difference():
    baseline, other = group_rows(EXPERIMENT, outcomes())
    assert (baseline.name, other.name) == ("every-global", "every-10")
    assert baseline.mean == pytest.approx(0.92)
    assert baseline.deviation == pytest.approx(0.02)
    assert (baseline.difference, baseline.interval) == (None, None)
    assert other.difference == pytest.approx(0.01)  # of 0.01, 0.02, 0.00
    assert other.interval == pytest.approx(4.303 * 0.01 / math.sqrt(3))
    assert row_cells(other, percent=True) == ("every-10", "3", "93.00 %", "1.73 %", "+1.00 % ± 2.48 %", "2", "3")


def test_only_seeds_that_both_have_are_paired():
    known = {key: value for key, value in ACCURACIES.items() if key not in [("global", 0), ("10", 2)]}
    _, other = group_rows(EXPERIMENT, outcomes(known))
    assert other.difference == pytest.approx(0.02)  # seed 1 only
    assert other.interval is None


def test_one_seed_has_no_deviation_and_no_baseline_no_difference():
    (row,) = group_rows(EXPERIMENT, outcomes({("10", 0): 0.91}))
    assert row_cells(row, percent=True) == ("every-10", "1", "91.00 %", "", "", "2", "3")


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.706), (16, 2.131), (17, 2.120), (31, 2.042), (121, 1.980)])
def test_the_interval_is_students(count, quantile):
    differences = [1.0, -1.0] * (count // 2) + [0.0] * (count % 2)
    deviation = math.sqrt(sum(x * x for x in differences) / (count - 1))
    assert half_interval(differences) == pytest.approx(quantile * deviation / math.sqrt(count), rel=1e-3)


def test_results_are_written_as_json_and_markdown(tmp_path):
    write_results(tmp_path, "own", EXPERIMENT, outcomes())
    values = json.loads((tmp_path / "results.json").read_text())
    assert [row["mean"] for row in values["rows"]] == pytest.approx([0.92, 0.93])
    assert len(values["runs"]) == 6
    assert "| every-10 | 3 | 93.00 % | 1.73 % | +1.00 % ± 2.48 % |" in (tmp_path / "table.md").read_text()
