"""The times of ranks -> rows for the timeline, few enough for a page."""

import math

import numpy as np

from evenly.reports.page.downsample import merged_rows, whole_numbers
from evenly.reports.rank_times import PHASES, RankTimes

LEAST_ROWS = 60  # for each rank, however many there are


def timeline(times: list[RankTimes], *, most_rows: int) -> dict[str, object] | None:
    """Returns the lanes of the timeline, one for each rank; None if nothing was recorded.

    Times are whole numbers of `unit_s`; of `PHASES` the last is what is left of a row.
    """
    shown = [part for part in times if len(part)]
    if not shown:
        return None
    end_s = max(float(part.ended_s[-1]) for part in shown)
    unit_s = 10.0 ** max(-6, math.ceil(math.log10(max(end_s, 1e-3) / 1e8)))
    by_rank: dict[int, list[RankTimes]] = {}
    for part in shown:
        by_rank.setdefault(part.started.rank, []).append(part)
    rows = max(LEAST_ROWS, most_rows // len(by_rank))
    lanes = [_lane(parts, unit_s, rows) for _, parts in sorted(by_rank.items())]
    return {"unit_s": unit_s, "end": math.ceil(end_s / unit_s), "lanes": lanes}


def _lane(parts: list[RankTimes], unit_s: float, most: int) -> dict[str, object]:
    """Returns the rows of one rank as columns."""
    began, seconds, first_step, steps, phases = [], [], [], [], []
    total_s = sum(float(part.seconds.sum()) for part in parts) or 1.0
    for part in parts:
        share = max(LEAST_ROWS, math.ceil(most * float(part.seconds.sum()) / total_s))
        starts = merged_rows(part, most=share)
        began.append(part.began_s[starts])
        first_step.append((part.step - part.steps)[starts] + 1)
        seconds.append(np.add.reduceat(part.seconds, starts))
        steps.append(np.add.reduceat(part.steps, starts))
        phases.append(np.add.reduceat(part.phases_s, starts, axis=0))
    started = parts[-1].started
    units = whole_numbers(np.concatenate(phases)[:, : len(PHASES) - 1] / unit_s)
    return {
        "rank": started.rank,
        "node": started.node,
        "host": started.host,
        "device": started.device,
        "began": whole_numbers(np.concatenate(began) / unit_s).tolist(),
        "length": whole_numbers(np.concatenate(seconds) / unit_s).tolist(),
        "first": whole_numbers(np.concatenate(first_step)).tolist(),
        "steps": whole_numbers(np.concatenate(steps)).tolist(),
        "phases": units.T.tolist(),
    }
