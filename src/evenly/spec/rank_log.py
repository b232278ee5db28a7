"""What each rank did during a run: the times of its steps, its exchanges, and the bytes on the link of its node.

Every rank writes `ranks/<rank>.jsonl` beside `run.jsonl`. Each start of the run adds a part, which begins with a
`RankStarted`. A line is a JSON object with an `event`, or an array of numbers: one step or several in a row, in the
order of the fields of `StepTimes`.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from evenly.spec._value import Value

FOLDER = "ranks"  # in the folder of a run
MOST_BYTES = 64 * 2**20  # read of one file; a rank writes far less
LEAST_ROW_S = 0.02  # a row of steps lasts at least this long ...
LEAST_PART = 1 / 4000  # ... and lines at least this part of the run so far: a file grows with the logarithm of its time


class RankStarted(Value):
    """The first line of a part: whose it is, and when the rank began to train."""

    event: Literal["rank"] = "rank"
    version: Literal[1] = 1
    at_s: float = Field(description="seconds since 1970; all other times of the part count from here")
    rank: int
    node: int
    host: str = ""
    device: str = ""
    step: int = Field(default=0, description="steps made before, in a run that was resumed")


class RankExchange(Value):
    """One exchange across nodes as this rank saw it: merged at `at_s`; see `ExchangeDone` for the other fields.

    In a long run a line stands for the last `count` exchanges: it tells of the last one, with the bytes of all.
    """

    event: Literal["exchange"] = "exchange"
    at_s: float
    number: int
    step: int
    merged: int
    seconds: float
    met_s: float
    waited_s: float
    sent_bytes: int
    count: int = 1


class LinkBytes(Value):
    """The bytes that the network interfaces of the rank's node had sent since the start; loopback left out.

    Only the first rank of each node writes it.
    """

    event: Literal["link"] = "link"
    at_s: float
    sent_bytes: int


# Training waits while a line is made: no other form is as fast.
EXCHANGE_LINE = (
    '{"event":"exchange","at_s":%.6f,"number":%d,"step":%d,"merged":%d,'
    '"seconds":%.6f,"met_s":%.6f,"waited_s":%.6f,"sent_bytes":%d,"count":%d}'
)
LINE = "[%d,%d,%.6f,%.6f,%.5g,%.5g,%.5g,%.5g,%.9g,%d]"


class StepTimes(NamedTuple):
    """One step of a rank, or several in a row: sums over them.

    The rank computed for `compute_s`, spent `gradients_s` on averaging gradients (which includes waiting for slower
    ranks of its node), was blocked by exchanges for `exchange_s` and waited for other nodes for `waiting_s`. The rest
    of `seconds` went into data, the optimizer and other things.
    """

    step: int  # the last of them
    steps: int
    ended_s: float
    seconds: float
    compute_s: float
    gradients_s: float
    exchange_s: float
    waiting_s: float
    samples: float
    gradient_bytes: int

    def to_line(self) -> str:
        """Returns the times as a line of the file."""
        return LINE % self


@dataclass(frozen=True)
class RankPart:
    """What one rank recorded from one start of a run on."""

    started: RankStarted
    steps: tuple[StepTimes, ...] = ()
    exchanges: tuple[RankExchange, ...] = ()
    links: tuple[LinkBytes, ...] = ()


@dataclass(frozen=True)
class RankLogs:
    """The parts of all ranks, by rank and in order, and a sentence for everything that could not be read."""

    parts: tuple[RankPart, ...]
    problems: tuple[str, ...] = ()


_Line = Annotated[RankStarted | RankExchange | LinkBytes, Field(discriminator="event")]
_LINE: TypeAdapter[RankStarted | RankExchange | LinkBytes] = TypeAdapter(_Line)


def read_rank_logs(folder: str | Path) -> RankLogs:
    """Returns what the ranks of the run in `folder` recorded; what cannot be read is told in `problems`."""
    parts: list[RankPart] = []
    problems: list[str] = []
    try:
        files = sorted(Path(folder, FOLDER).glob("*.jsonl"), key=lambda file: (len(file.stem), file.stem))
    except OSError as error:
        return RankLogs((), (f"cannot read {Path(folder, FOLDER)}: {error.strerror}",))
    for file in files:
        try:
            with file.open("rb") as stream:
                text = stream.read(MOST_BYTES + 1)
        except OSError as error:
            problems.append(f"cannot read {file}: {error.strerror}")
            continue
        if len(text) > MOST_BYTES:
            problems.append(f"{file} has more than {MOST_BYTES >> 20} MiB; what follows was not read")
            text = text[: text.rfind(b"\n", 0, MOST_BYTES) + 1]
        logs = parse_rank_log(text.split(b"\n"), name=str(file))
        parts += logs.parts
        problems += logs.problems
    return RankLogs(tuple(sorted(parts, key=lambda part: part.started.rank)), tuple(problems))


def parse_rank_log(lines: Iterable[str | bytes], *, name: str) -> RankLogs:
    """Returns the parts in the lines of one file; a last line cut short by a crash is left out without a word."""
    started: RankStarted | None = None
    parts: list[RankPart] = []
    steps: list[StepTimes] = []
    others: list[RankExchange | LinkBytes] = []
    unread: list[int] = []
    rows = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    for number, line in rows:
        entry = parse_line(line)
        if isinstance(entry, RankStarted):
            parts += _closed(started, steps, others)
            started, steps, others = entry, [], []
        elif entry is None or started is None:
            unread.append(number)
        elif isinstance(entry, StepTimes):
            steps.append(entry)
        else:
            others.append(entry)
    parts += _closed(started, steps, others)
    if unread and unread[-1] == rows[-1][0] and len(rows) > 1:
        del unread[-1]
    problems = [f"{name}: {_count(unread)} could not be read, the first is line {unread[0]}"] if unread else []
    return RankLogs(tuple(parts), tuple(problems))


def parse_line(line: str | bytes) -> RankStarted | RankExchange | LinkBytes | StepTimes | None:
    """Returns what one line holds; None if it cannot be read."""
    try:
        if line[:1] not in ("[", b"["):
            return _LINE.validate_json(line)
        values = json.loads(line)
        if len(values) == len(StepTimes._fields) and all(map(_is_number, values)):
            return StepTimes(*values)
    except (ValueError, ValidationError, RecursionError):
        pass
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30 and math.isfinite(value)


def _closed(
    started: RankStarted | None, steps: Sequence[StepTimes], others: Sequence[RankExchange | LinkBytes]
) -> list[RankPart]:
    if started is None:
        return []
    exchanges = tuple(entry for entry in others if isinstance(entry, RankExchange))
    return [
        RankPart(started, tuple(steps), exchanges, tuple(entry for entry in others if isinstance(entry, LinkBytes)))
    ]


def _count(lines: Sequence[int]) -> str:
    return "1 line" if len(lines) == 1 else f"{len(lines)} lines"
