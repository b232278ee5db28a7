"""Names of labs with their owner, so that abandoned labs can be told from live ones."""

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path

_PATTERN = re.compile(r"(evn(\d+)-(\d+)-(\d+))(-.+)?")
_COUNT = itertools.count()


@dataclass(frozen=True)
class LabName:
    """The owner's process id and start time, and a per-process counter."""

    pid: int
    start: int
    count: int

    def __str__(self) -> str:
        return f"evn{self.pid}-{self.start}-{self.count}"

    @property
    def abandoned(self) -> bool:
        """Whether the owner is gone; the start time tells it from a later process with the same id."""
        return _start_time(self.pid) != self.start


def new_name() -> LabName:
    """Returns the name of a new lab of this process."""
    pid = os.getpid()
    return LabName(pid=pid, start=_start_time(pid) or 0, count=next(_COUNT))


def parse_name(text: str) -> LabName | None:
    """Returns the lab that a namespace or control group called `text` belongs to, None for anything else.

    >>> str(parse_name("evn12-345-0-switch"))
    'evn12-345-0'
    >>> parse_name("eth0") is None
    True
    """
    match = _PATTERN.fullmatch(text)
    return match and LabName(pid=int(match[2]), start=int(match[3]), count=int(match[4]))


def _start_time(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the process name before it may contain blanks and brackets
    return None if state in "ZX" else int(fields[18])
