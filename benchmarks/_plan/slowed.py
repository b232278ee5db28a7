"""A device that becomes four times slower in the middle of a run: the rate with rebalancing, over the best possible.

Batches are rebalanced, or units of a network that is cut over both devices. At the end of the run rebalancing stops and
fixed shares are tried one after another; the best of them is what was possible.
"""

import sys
from typing import get_args

from benchmarks._plan.lab import run_with_quotas
from benchmarks._plan.slowed_worker import FIXED_AT, SLOW_AT, TRIAL_STEPS, TRIED_FIFTIETHS, Rebalanced
from benchmarks.common import Row, median
from evenly.lab import LabNode

REBALANCED: tuple[Rebalanced, ...] = get_args(Rebalanced)
TIMES = 3  # runs of each kind
WARM_UP_STEPS = 5
ADAPTED_AFTER = 20  # steps after the device became slow


def rebalanced_rate(what: Rebalanced, times: int = TIMES) -> tuple[float, Row]:
    """Returns the rate with rebalancing over the best possible, of `times` runs the median, and a row with all runs."""
    runs = sorted(_run_slowed(what) for _ in range(times))
    ratio, description = runs[len(runs) // 2]
    all_ratios = ", ".join(f"{ratio:.2f}" for ratio, _ in runs)
    return ratio, {"cluster": f"slowed, {what} follow", "plan": f"{description}; in {times} runs {all_ratios} of it"}


def _run_slowed(what: Rebalanced) -> tuple[float, str]:
    """Returns a ratio of rates, and the rates in words.

    The ratio is the rate from 20 steps after the slow-down on, over the best rate of fixed shares.
    """
    rates = run_with_quotas(
        [LabNode(name="n", ranks=2)],
        "--slowing",
        what,
        answers=[[0.7, 0.7], [0.7, 0.175]],
        timeout_s=600,
    )["rates"]
    before = median(rates[WARM_UP_STEPS:SLOW_AT])
    dip = median(rates[SLOW_AT : SLOW_AT + 5])
    reached = median(rates[SLOW_AT + ADAPTED_AFTER : FIXED_AT])
    best = median(rates[FIXED_AT + TRIAL_STEPS * len(TRIED_FIFTIETHS) + 1 :])
    print(f"slowed, {what} follow: {reached:.0f} of {best:.0f} samples/s", file=sys.stderr, flush=True)
    return reached / best, f"{before:.0f}, then {dip:.0f}, then {reached:.0f} samples/s; at best {best:.0f}"
