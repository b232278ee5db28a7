"""Where the ranks' words go."""

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
_KEPT_CHARS = 65_536


class Outlet(ABC):
    """Takes what the ranks write, as it comes."""

    @abstractmethod
    def take(self, text: str, *, slot: RankSlot, stream: Stream) -> None:
        """Takes the next text of a rank's stream; an empty text says that the stream has ended."""

    @abstractmethod
    def finish(self, failed: Collection[RankSlot]) -> None:
        """Does what is left to do once all ranks have ended, some of which `failed` of their own accord."""

    @abstractmethod
    def texts(self, stream: Stream) -> tuple[str, ...]:
        """Returns the text of every rank, or nothing where it is not kept."""


def open_outlet(output: Output, *, slots: Sequence[RankSlot]) -> Outlet:
    """Returns the outlet called `output`."""
    if output == "prefix":
        return Prefixed()
    if output == "rank0":
        return RankZero()
    if output == "capture":
        return Captured(slots)
    raise LabError(f"output={output!r} was asked for, which is no way to show ranks. Use one of {get_args(Output)}.")


@final
class Prefixed(Outlet):
    """Writes every line to standard output, after the name of its rank."""

    def __init__(self) -> None:
        self._begun: dict[tuple[RankSlot, Stream], str] = {}

    def take(self, text: str, *, slot: RankSlot, stream: Stream) -> None:
        """Writes the lines that are complete, and at the end of the stream also an incomplete one."""
        *lines, rest = (self._begun.get((slot, stream), "") + text).split("\n")
        if not text and rest:
            lines, rest = [rest], ""
        self._begun[slot, stream] = rest
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
            self._last[slot] = (self._last[slot] + text)[-_KEPT_CHARS:]

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
        self._seats = slots
        self._kept: dict[tuple[RankSlot, Stream], list[str]] = defaultdict(list)

    def take(self, text: str, *, slot: RankSlot, stream: Stream) -> None:
        """Keeps the text."""
        self._kept[slot, stream].append(text)

    def finish(self, failed: Collection[RankSlot]) -> None:
        """Has nothing left to do."""

    def texts(self, stream: Stream) -> tuple[str, ...]:
        """Returns what every rank wrote to the stream."""
        return tuple("".join(self._kept[slot, stream]) for slot in self._seats)


def _write_lines(target: TextIO, *, slot: RankSlot, lines: Sequence[str]) -> None:
    if lines:
        target.write("".join(f"[{slot.label}] {line}\n" for line in lines))
        target.flush()
