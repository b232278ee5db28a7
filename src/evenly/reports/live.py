"""Files of a run that goes on -> one row per rank: how it spends its time now, and the bytes it sends."""

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from evenly.errors import SpecError
from evenly.spec import (
    EveryGradient,
    LinkBytes,
    Measured,
    RankExchange,
    RankStarted,
    RunFailed,
    RunFinished,
    RunStarted,
    StepTimes,
)
from evenly.spec.lenient_run import FILE as EVENTS_FILE
from evenly.spec.lenient_run import parse_leniently
from evenly.spec.rank_log import FOLDER, parse_line

WINDOW_S = 5.0  # of a rank's time that a row shows
PHASES = ("computing", "averaging", "sending", "waiting", "other")


@dataclass(frozen=True)
class LiveRow:
    """One rank during the last seconds: the parts of its time, and the bytes that it sent since the start."""

    rank: int
    node: int
    host: str
    step: int
    steps_per_s: float
    parts: tuple[float, ...]  # one for each of `PHASES`; their sum is 1
    sent_bytes: int
    link_bytes: int | None  # of its node's network interfaces; None unless this rank reads them

    @property
    def state(self) -> str:
        """What the rank does for the largest part of its time."""
        return PHASES[max(range(len(PHASES)), key=lambda index: self.parts[index])]


class GrowingFile:
    """A file to which lines are added, and how far it was read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0  # of the first line that was not complete yet: a new start of a run may replace that line

    def new_lines(self) -> list[bytes]:
        """Returns the lines that were completed since the last call; all of them again if the file begins anew."""
        try:
            with self._path.open("rb") as stream:
                if stream.seek(0, 2) < self._position:
                    self._position = 0
                stream.seek(self._position)
                text = stream.read()
        except OSError:
            return []
        complete, newline, _ = text.rpartition(b"\n")
        self._position += len(complete) + len(newline)
        return [line for line in complete.split(b"\n") if line.strip()]


class _RankTail:
    """The last seconds of one rank."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self.started: RankStarted | None = None
        self.rows: deque[StepTimes] = deque()
        self.exchange_bytes = self.gradient_bytes = 0
        self.link_bytes: int | None = None

    def forget(self) -> None:
        """Drops what an earlier start of the run has made."""
        self.started = self.link_bytes = None
        self.rows.clear()

    def read(self) -> bool:
        """Takes in what the rank has written since the last call, and returns whether there was anything."""
        lines = self._file.new_lines()
        for line in lines:
            entry = parse_line(line)
            if isinstance(entry, RankStarted):
                self.started = entry
                self.rows.clear()
                self.exchange_bytes = self.gradient_bytes = 0
            elif isinstance(entry, StepTimes):
                self.rows.append(entry)
                self.gradient_bytes += entry.gradient_bytes
            elif isinstance(entry, RankExchange):
                self.exchange_bytes += entry.sent_bytes
            elif isinstance(entry, LinkBytes):
                self.link_bytes = entry.sent_bytes
        while self.rows and self.rows[0].ended_s < self.rows[-1].ended_s - WINDOW_S:
            self.rows.popleft()
        return bool(lines)

    def part(self, field: str) -> float:
        """Returns the part of the last seconds that went into a field of `StepTimes`."""
        seconds: float = sum(getattr(row, field) for row in self.rows)
        return seconds / max(1e-9, sum(row.seconds for row in self.rows))


class FollowedRun:
    """A run that another program makes, as its files show it.

    Attributes:
        started: the last start of the run; None before it is known.
        is_over: whether that start has ended.
        values: what was logged last, by name.
        problems: a sentence for each part that could not be read.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        self._folder = file.parent if file.name == EVENTS_FILE else file
        if not self._folder.is_dir():
            raise SpecError(f"the run in {path} was to be followed, but there is no such folder. Give a run folder.")
        self._events = GrowingFile(self._folder / EVENTS_FILE)
        self._tails: dict[str, _RankTail] = {}
        self.started: RunStarted | None = None
        self.is_over = False
        self.values: dict[str, float] = {}
        self.problems: list[str] = []

    def read(self) -> bool:
        """Takes in what was written since the last call, and returns whether there was anything."""
        lines = self._events.new_lines()
        if lines:
            self._take(lines)
        for file in sorted(Path(self._folder, FOLDER).glob("*.jsonl")):
            self._tails.setdefault(file.name, _RankTail(file))
        return any([bool(lines), *(tail.read() for tail in self._tails.values())])

    def _take(self, lines: list[bytes]) -> None:
        run, problems = parse_leniently(lines, name=str(self._folder / EVENTS_FILE))
        self.problems += problems
        for event in run.events:
            if isinstance(event, RunStarted):
                self.started, self.is_over = event, False
                for tail in self._tails.values():
                    tail.forget()
            elif isinstance(event, RunFinished | RunFailed):
                self.is_over = True
            elif isinstance(event, Measured):
                self.values.update({name: value for name, value in event.values.items() if value is not None})

    def rows(self) -> list[LiveRow]:
        """Returns a row for each rank that has made steps."""
        plan = None if self.started is None else self.started.plan
        is_global = plan is not None and isinstance(plan.period, EveryGradient)
        ranks = math.inf if self.started is None else len(self.started.ranks) or self.started.cluster.world_size
        found = [
            (tail.started, tail)
            for tail in self._tails.values()
            if tail.started is not None and tail.rows and tail.started.rank < ranks  # earlier starts may have had more
        ]
        rows = []
        for started, tail in found:
            together = [other for other_started, other in found if is_global or other_started.node == started.node]
            rows.append(_row(started, tail, together))
        return sorted(rows, key=lambda row: row.rank)


def _row(started: RankStarted, tail: _RankTail, together: list[_RankTail]) -> LiveRow:
    """Returns the row of one rank; those `together` average gradients with it, and the slowest of them never waits."""
    seconds = max(1e-9, sum(row.seconds for row in tail.rows))
    averaging = min(other.part("gradients_s") for other in together)
    computing, sending = tail.part("compute_s"), tail.part("exchange_s")
    waiting = tail.part("waiting_s") + tail.part("gradients_s") - averaging
    other = max(0.0, 1 - computing - averaging - sending - waiting)
    total = computing + averaging + sending + waiting + other
    return LiveRow(
        rank=started.rank,
        node=started.node,
        host=started.host,
        step=tail.rows[-1].step,
        steps_per_s=sum(row.steps for row in tail.rows) / seconds,
        parts=tuple(part / total for part in (computing, averaging, sending, waiting, other)),
        sent_bytes=tail.exchange_bytes + tail.gradient_bytes,
        link_bytes=tail.link_bytes,
    )
