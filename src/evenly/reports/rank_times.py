"""What ranks recorded -> where the time of each went, step by step, waiting inside the node told apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from evenly.reports.reading import RecordedRun
from evenly.reports.time_axis import TimeAxis, time_axis
from evenly.spec import EveryGradient, LinkBytes, RankExchange, RankPart, RankStarted, RunStarted, StepTimes

Numbers = npt.NDArray[np.float64]
PHASES = ("compute", "averaging", "exchange", "waiting", "other")


@dataclass(frozen=True)
class RankTimes:
    """One rank from one start of a run on: an entry for each recorded row of one step or several.

    `phases_s` has the seconds of each of `PHASES`, one row for each entry.
    """

    started: RankStarted
    begins_s: float  # in training time
    step: Numbers  # the last of each row
    steps: Numbers
    ended_s: Numbers  # in training time
    seconds: Numbers
    phases_s: Numbers  # [rows, phases]
    samples: Numbers
    gradient_bytes: Numbers
    exchanges: tuple[RankExchange, ...]
    links: tuple[LinkBytes, ...]

    @property
    def began_s(self) -> Numbers:
        """When each row began, in training time."""
        return self.ended_s - self.seconds

    def __len__(self) -> int:
        return len(self.step)


def rank_times(recorded: RecordedRun, axis: TimeAxis | None = None) -> list[RankTimes]:
    """Returns the times of all ranks, by rank and start, since the last fresh start of the run."""
    axis = axis or time_axis(recorded.run, recorded.logs.parts)
    found = [(part, axis.start_of_part(part)) for part in recorded.logs.parts]
    started_parts = [(part, start) for part, start in found if start is not None]
    shifts_s = _clock_shifts([(part, start, axis.part_begins_s(part, start)) for part, start in started_parts])
    started = recorded.run.last(RunStarted)
    is_global = started is not None and started.plan is not None and isinstance(started.plan.period, EveryGradient)
    times = []
    for part, start in started_parts:
        together = [
            other
            for other, other_start in started_parts
            if other_start == start and other.steps and (is_global or other.started.node == part.started.node)
        ]
        begins_s = axis.part_begins_s(part, start) + shifts_s.get((start, part.started.host), 0.0)
        times.append(_times_of(part, together, begins_s))
    return times


def _times_of(part: RankPart, together: Sequence[RankPart], begins_s: float) -> RankTimes:
    """Returns the times of one part; the parts in `together` average gradients with it."""
    rows = np.array(part.steps, dtype=np.float64).reshape(-1, len(StepTimes._fields))
    columns = dict(zip(StepTimes._fields, rows.T, strict=True))
    step, own_s = columns["step"], columns["gradients_s"]
    first = step - columns["steps"]
    averaging_s = own_s.copy()
    for other in together:
        if other is not part:
            at, total_s = _cumulative_gradients(other)
            other_s = np.interp(step, at, total_s) - np.interp(first, at, total_s)
            is_recorded = (first >= at[0]) & (step <= at[-1])  # by the other rank
            averaging_s = np.where(is_recorded, np.minimum(averaging_s, other_s), averaging_s)
    averaging_s = np.maximum(0.0, averaging_s)
    waiting_s = columns["waiting_s"] + own_s - averaging_s
    accounted_s = columns["compute_s"] + averaging_s + columns["exchange_s"] + waiting_s
    rest_s = np.maximum(0.0, columns["seconds"] - accounted_s)
    return RankTimes(
        started=part.started,
        begins_s=begins_s,
        step=step,
        steps=columns["steps"],
        ended_s=columns["ended_s"] + begins_s,
        seconds=columns["seconds"],
        phases_s=np.stack([columns["compute_s"], averaging_s, columns["exchange_s"], waiting_s, rest_s], axis=1),
        samples=columns["samples"],
        gradient_bytes=columns["gradient_bytes"],
        exchanges=part.exchanges,
        links=part.links,
    )


def _cumulative_gradients(part: RankPart) -> tuple[list[float], list[float]]:
    """Returns steps, and the seconds for which the rank had averaged gradients after each."""
    at, total_s = [float(part.steps[0].step - part.steps[0].steps)], [0.0]
    for row in part.steps:
        at.append(float(row.step))
        total_s.append(total_s[-1] + row.gradients_s)
    return at, total_s


def _clock_shifts(parts: Sequence[tuple[RankPart, int, float]]) -> dict[tuple[int, str], float]:
    """Returns for each start and host the seconds to add to its times so that exchanges end together on all hosts.

    The clocks of machines differ. An exchange that training waits for ends at the same time on all ranks. Starts are
    compared by themselves: a resumed run repeats numbers of exchanges, and its ranks may be on other hosts. `parts`
    come with the number of their start and the time at which they begin, those of the lowest rank first.
    """
    merged_s: dict[tuple[int, str], dict[int, float]] = {}
    references: dict[int, str] = {}
    for part, start, begins_s in parts:
        references.setdefault(start, part.started.host)
        for done in part.exchanges:
            if done.merged == done.step:
                merged_s.setdefault((start, part.started.host), {})[done.number] = begins_s + done.at_s
    shifts = {}
    for (start, host), times_s in merged_s.items():
        reference = merged_s.get((start, references[start]), {})
        differences = [reference[number] - time_s for number, time_s in times_s.items() if number in reference]
        if differences:
            shifts[start, host] = median(differences)
    return shifts
