"""Reads what can be read of a run's record: broken, cut, foreign or huge files give fewer events and a sentence."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from evenly.spec._text import long_number
from evenly.spec.run import Event, Run

FILE = "run.jsonl"
MOST_BYTES = 256 * 2**20  # read of one file
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class LenientRun(NamedTuple):
    """The events that could be read, and a sentence for each file that could not be read as a whole."""

    run: Run
    problems: tuple[str, ...] = ()


def read_leniently(path: str | Path, *, most_bytes: int = MOST_BYTES) -> LenientRun:
    """Returns what can be read of the run in the folder or `run.jsonl` file `path`; never raises for what it holds."""
    file = Path(path)
    try:
        file = file / FILE if file.is_dir() else file
        with file.open("rb") as stream:
            text = stream.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # a path with a NUL character is a ValueError
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return LenientRun(Run(events=()), (f"cannot read a run from {file}: {reason}. Give a run folder.",))
    problems = []
    if len(text) > most_bytes:
        problems.append(f"{file} has more than {_size(most_bytes)}; what follows was not read.")
        text = text[: text.rfind(b"\n", 0, most_bytes) + 1]
    parsed = parse_leniently(text.split(b"\n"), name=str(file))
    return LenientRun(parsed.run, (*problems, *parsed.problems))


def parse_leniently(lines: Iterable[str | bytes], *, name: str) -> LenientRun:
    """Returns the events in `lines`; a last line cut short by a crash is left out without a word."""
    events: list[Event] = []
    unread: list[tuple[int, str]] = []
    rows = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    for number, line in rows:
        try:
            if (long := long_number(line)) is not None:
                unread.append((number, f"it holds the number {long}"))
            else:
                events.append(_EVENT.validate_json(line))
        except ValidationError as error:
            detail = error.errors()[0]
            is_cut = line[:1] in ("{", b"{") and number == rows[-1][0] and detail["type"] == "json_invalid"
            if not is_cut or len(rows) == 1:
                place = ".".join(str(part) for part in detail["loc"])
                unread.append((number, f"{place} {detail['msg']}".strip()))
    return LenientRun(Run(events=tuple(events)), tuple(_sentences(name, rows=len(rows), unread=unread)))


def _sentences(name: str, *, rows: int, unread: list[tuple[int, str]]) -> list[str]:
    if not rows:
        return [f"{name} is empty: the run recorded nothing, or the file was replaced."]
    if not unread:
        return []
    number, reason = unread[0]
    if len(unread) == rows:
        lines = "its only line" if rows == 1 else f"none of its {rows} lines"
        verb = "is not" if rows == 1 else "is"
        return [f"{name} is not the record of a run: {lines} {verb} an event (line {number}: {reason})."]
    count = "1 line is" if len(unread) == 1 else f"{len(unread)} of {rows} lines are"
    return [
        f"{name}: {count} not an event and left out, first line {number}: {reason}. "
        "The file was written by another version, edited or damaged."
    ]


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 2**20 else f"{size_bytes} bytes"
