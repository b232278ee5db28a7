"""Outlets for the output of the ranks."""

import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Literal, TextIO, final, get_args

from evenly.errors import LabError
from evenly.lab._ranks import RankSlot

Output = Literal["prefix", "rank0", "capture"]
Stream = Literal["stdout", "stderr"]
_LAST_LINES = 20
_MOST_CHARS = 65_536


class Outlet(ABC):
    """Receives the output of the ranks."""

    @abstractmethod
    def take(self, text: str, *, slot: RankSlot, stream: Stream) -> None:
        """Takes the next text of a rank's stream; an empty text says that the stream has ended."""

    @abstractmethod
    def finish(self, failed: Collection[RankSlot]) -> None:
        """Called once all ranks have ended; `failed` lists those that failed by themselves."""

    @abstractmethod
    def texts(self, stream: Stream) -> tuple[str, ...]:
        """Returns the text of every rank, or nothing if it is not captured."""


def open_outlet(output: Output, *, slots: Sequence[RankSlot]) -> Outlet:
    """Returns the outlet called `output`."""
    if output == "prefix":
        return Prefixed()
    if output == "rank0":
        return RankZero()
    if output == "capture":
        return Captured(slots)
    raise LabError(f"output={output!r} was asked for, which is no kind of output. Use one of {get_args(Output)}.")


@final
class Prefixed(Outlet):
    """Writes every line to standard output, after the name of its rank."""

    def __init__(self) -> None:
        self._incomplete: dict[tuple[RankSlot, Stream], str] = {}

    def take(self, text: str, *, slot: RankSlot, stream: Stream) -> None:
        """Writes the lines that are complete, and at the end of the stream also an incomplete one."""
        *lines, incomplete = (self._incomplete.get((slot, stream), "") + text).split("\n")
        if not text and incomplete:
            lines, incomplete = [incomplete], ""
        self._incomplete[slot, stream] = incomplete
        _write_lines(sys.stdout, slot=slot, lines=lines)

    def finish(self, failed: Collection[RankSlot]) -> None:
        """Has nothing left to do."""

    def texts(self, stream: Stream) -> tuple[str, ...]:
        """Returns nothing."""
        return ()


@final
class RankZero(Outlet):
    """Writes what rank 0 writes, as it is; of other ranks that fail, the last lines of their standard error."""

    def __init__(self) -> None:
        self._last: dict[RankSlot, str] = defaultdict(str)

    def take(self, text: str, *, slot: RankSlot, stream: Stream) -> None:
        """Passes rank 0 on and remembers the end of the others' standard error."""
        if slot.rank == 0:
            target = sys.stdout if stream == "stdout" else sys.stderr
            target.write(text)
            target.flush()
        elif stream == "stderr":
            self._last[slot] = (self._last[slot] + text)[-_MOST_CHARS:]

    def finish(self, failed: Collection[RankSlot]) -> None:
        """Writes the last lines of the other ranks that failed."""
        for slot in failed:
            _write_lines(sys.stderr, slot=slot, lines=self._last[slot].splitlines()[-_LAST_LINES:])

    def texts(self, stream: Stream) -> tuple[str, ...]:
        """Returns nothing."""
        return ()


@final
class Captured(Outlet):
    """Keeps the text of every rank."""

    def __init__(self, slots: Sequence[RankSlot]) -> None:
        self._slots = slots
        self._texts: dict[tuple[RankSlot, Stream], list[str]] = defaultdict(list)

    def take(self, text: str, *, slot: RankSlot, stream: Stream) -> None:
        """Keeps the text."""
        self._texts[slot, stream].append(text)

    def finish(self, failed: Collection[RankSlot]) -> None:
        """Has nothing left to do."""

    def texts(self, stream: Stream) -> tuple[str, ...]:
        """Returns what every rank wrote to the stream."""
        return tuple("".join(self._texts[slot, stream]) for slot in self._slots)


def _write_lines(target: TextIO, *, slot: RankSlot, lines: Sequence[str]) -> None:
    if lines:
        target.write("".join(f"[{slot.label}] {line}\n" for line in lines))
        target.flush()
