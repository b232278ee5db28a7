"""The time of a run: seconds of training, in which interruptions take none."""

from dataclasses import dataclass
from itertools import accumulate

from evenly.reports.fresh_start import since_fresh_start
from evenly.spec import RankPart, Run, RunStarted


@dataclass(frozen=True)
class TimeAxis:
    """When each start of a run began and ended, in seconds since 1970, and the training time before it."""

    began_at_s: tuple[float, ...]
    before_s: tuple[float, ...]
    other_began_at_s: tuple[float, ...] = ()  # of starts that do not count

    def start_of(self, at_s: float) -> int:
        """Returns the number of the start to which an event of this time belongs."""
        return max((n for n, began in enumerate(self.began_at_s) if began <= at_s), default=0)

    def seconds(self, at_s: float) -> float:
        """Returns the training time of an event of rank 0."""
        start = self.start_of(at_s)
        return max(0.0, at_s - self.began_at_s[start]) + self.before_s[start]

    def start_of_part(self, part: RankPart) -> int | None:
        """Returns the number of the start to which a rank's part belongs; None if that does not count.

        The clocks of machines differ: the nearest start is meant.
        """
        distances = [abs(part.started.at_s - began) for began in self.began_at_s]
        nearest = min(distances)
        if any(abs(part.started.at_s - began) < nearest for began in self.other_began_at_s):
            return None
        return distances.index(nearest)

    def part_begins_s(self, part: RankPart, start: int) -> float:
        """Returns the training time at which a part of this start begins, by the clock of its rank."""
        return max(0.0, part.started.at_s - self.began_at_s[start]) + self.before_s[start]


def time_axis(run: Run, parts: tuple[RankPart, ...] = ()) -> TimeAxis:
    """Returns the time axis of a run since its last fresh start; of one without events, since its ranks began."""
    whole = since_fresh_start(run)
    began, ended = list[float](), list[float]()
    for event in whole.events:
        if isinstance(event, RunStarted) or not began:
            began.append(event.at_s)
            ended.append(event.at_s)
        ended[-1] = max(ended[-1], event.at_s)
    if not began:
        earliest = min((part.started.at_s for part in parts), default=0.0)
        return TimeAxis((earliest,), (0.0,))
    lengths = [end - begin for begin, end in zip(began, ended, strict=True)]
    before_s = tuple(accumulate(lengths[:-1], initial=0.0))
    others = {event.at_s for event in run.of(RunStarted)} - set(began)
    return TimeAxis(tuple(began), before_s, tuple(sorted(others)))
