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
    together: dict[tuple[int, int], list[_Columns]] = {}  # parts that average gradients with each other
    tables = []
    for part, start in started_parts:
        columns, group = _columns(part), (start, 0 if is_global else part.started.node)
        begins_s = axis.part_begins_s(part, start) + shifts_s.get((start, part.started.host), 0.0)
        tables.append((part, columns, group, begins_s))
        together.setdefault(group, []).append(columns)
    return [_times_of(part, columns, together[group], begins_s) for part, columns, group, begins_s in tables]


_Columns = dict[str, Numbers]  # by the fields of `StepTimes`


def _columns(part: RankPart) -> _Columns:
    """Returns the rows of a part as columns, and its `averaged_s`: how long it had averaged after each of `reached`."""
    rows = np.array(part.steps, dtype=np.float64).reshape(-1, len(StepTimes._fields))
    columns = dict(zip(StepTimes._fields, rows.T, strict=True))
    columns["reached"] = np.append(columns["step"][:1] - columns["steps"][:1], columns["step"])
    columns["averaged_s"] = np.append(np.zeros(min(1, len(rows))), np.cumsum(columns["gradients_s"]))
    return columns


def _times_of(part: RankPart, columns: _Columns, together: Sequence[_Columns], begins_s: float) -> RankTimes:
    """Returns the times of one part; those in `together` average gradients with it."""
    step, own_s = columns["step"], columns["gradients_s"]
    first = step - columns["steps"]
    averaging_s = own_s.copy()
    for other in together:
        if other is not columns and len(other["step"]):
            reached, averaged_s = other["reached"], other["averaged_s"]
            other_s = np.interp(step, reached, averaged_s) - np.interp(first, reached, averaged_s)
            is_recorded = (first >= reached[0]) & (step <= reached[-1])  # by the other rank
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
