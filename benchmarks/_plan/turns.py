"""Runs plans in turns, a few steps each, round after round; slow plans stop early."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks._plan.runner import PlanRunner
from benchmarks.common import median

STEPS_PER_ROUND = 8
FIRST_ROUND_STEPS = 3
FIRST_LIMIT = 1.3  # a plan stops if it is so many times slower than the best after the first round
LATER_LIMIT = 1.12  # the same after a quarter of the rounds


def run_in_turns(
    runners: Sequence[PlanRunner],
    *,
    always_run: Sequence[PlanRunner],
    rounds: int,
    quota: float,
    halfway: Callable[[], None],
) -> None:
    """Runs the plans for so many rounds and calls `halfway` in the middle.

    Plans that are too slow stop and are closed, except those in `always_run`. All ranks call this together.
    """
    for runner in runners:
        runner.run(FIRST_ROUND_STEPS, quota)
    remaining = _keep_fast(runners, always_run, FIRST_LIMIT)
    for runner in remaining:
        runner.forget_rounds()
    for number in range(rounds):
        for place in range(len(remaining)):
            remaining[(place + number) % len(remaining)].run(STEPS_PER_ROUND, quota)
        if number + 1 == rounds // 4:
            remaining = _keep_fast(remaining, always_run, LATER_LIMIT)
        if number + 1 == rounds // 2:
            halfway()


def _keep_fast(runners: Sequence[PlanRunner], always_run: Sequence[PlanRunner], limit: float) -> list[PlanRunner]:
    """Returns the plans that are less than `limit` times slower than the best, and `always_run`; closes the others."""
    seconds = [_largest_of_ranks(_step_seconds(runner)) for runner in runners]
    remaining = [
        runner
        for runner, step_s in zip(runners, seconds, strict=True)
        if runner in always_run or step_s < limit * min(seconds)
    ]
    for runner in runners:
        if runner not in remaining:
            runner.close()  # its failure monitor uses CPU time that a slow device misses
    return remaining


def _step_seconds(runner: PlanRunner) -> float:
    """Returns the median step of this rank, without the round that warms up if there are others; 0 if left out."""
    return median(runner.step_seconds[1:] or runner.step_seconds) if runner.takes_part else 0.0


def _largest_of_ranks(seconds: float) -> float:
    """Returns the largest of all ranks' numbers."""
    number = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)
