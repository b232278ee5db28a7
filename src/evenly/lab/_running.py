"""The processes of one command, from their start to their end."""

import codecs
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, cast

from evenly.lab._output import Outlet, Stream
from evenly.lab._ranks import RankSlot
from evenly.lab._signals import uninterrupted

_TERM_S = 3.0
_DRAIN_S = 3.0


@dataclass(frozen=True)
class _Exit:
    """Selector data: the end of a rank."""

    slot: RankSlot


@dataclass(frozen=True)
class _Pipe:
    """Selector data: output of a rank."""

    slot: RankSlot
    stream: Stream
    decoder: codecs.IncrementalDecoder


class Running:
    """Ranks that run: their processes, their pipes and the first one that failed.

    Everything runs in the calling thread, since the kernel ends a rank when the thread that started it ends.
    """

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._selector = selectors.DefaultSelector()
        self._processes: dict[RankSlot, subprocess.Popen[bytes]] = {}
        self._alive: set[RankSlot] = set()
        self._stopping = False
        self.failed: dict[RankSlot, float] = {}
        self.ended_at = 0.0

    def start(self, arguments: Sequence[str], *, slot: RankSlot) -> None:
        """Starts one rank in a session of its own."""
        with uninterrupted():
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._processes[slot] = process
            self._alive.add(slot)
            self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, _Exit(slot))
            for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
                decoder = codecs.getincrementaldecoder("utf-8")("replace")
                data = _Pipe(slot, cast(Stream, stream), decoder)
                self._selector.register(cast(BinaryIO, pipe), selectors.EVENT_READ, data)

    def follow(self, *, until: float, grace_s: float) -> bool:
        """Passes output on until all ranks have ended; returns False if `until` or the grace time ends first."""
        while self._alive:
            deadline = min(until, min(self.failed.values(), default=math.inf) + grace_s)
            if not self._pump(deadline):
                return False
        return True

    def stop(self, kill: Callable[[], None]) -> None:
        """Terminates running ranks and reads their remaining output; `kill` ends processes that are left."""
        with uninterrupted():
            try:
                self._stopping = True
                for slot in self._alive:
                    with suppress(ProcessLookupError):
                        os.killpg(self._processes[slot].pid, signal.SIGTERM)
                self._pump_while(lambda: bool(self._alive), seconds=_TERM_S)
            finally:
                self._end(kill)
        self._outlet.finish(sorted(self.failed, key=lambda slot: slot.rank))

    def exit_codes(self) -> tuple[int, ...]:
        """Returns the exit codes by rank; -N stands for the end by signal N."""
        return tuple(process.wait() for process in self._processes.values())

    def _end(self, kill: Callable[[], None]) -> None:
        try:
            for slot in self._alive:
                with suppress(ProcessLookupError):
                    os.killpg(self._processes[slot].pid, signal.SIGKILL)
            kill()
            self._pump_while(lambda: bool(self._selector.get_map()), seconds=_DRAIN_S)
        finally:
            for key in list(self._selector.get_map().values()):
                self._close(key)
            self._selector.close()
            for process in self._processes.values():
                process.wait()

    def _pump_while(self, condition: Callable[[], bool], *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while condition() and self._pump(deadline):
            pass

    def _pump(self, deadline: float) -> bool:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return False
        for key, _events in self._selector.select(None if math.isinf(remaining_s) else remaining_s):
            if isinstance(key.data, _Exit):
                self._note_exit(key.data.slot)
                self._close(key)
            elif not self._pass_on(key.fd, key.data):
                self._close(key)
        return True

    def _note_exit(self, slot: RankSlot) -> None:
        self.ended_at = time.monotonic()
        self._alive.discard(slot)
        if self._processes[slot].wait() != 0 and not self._stopping:
            self.failed[slot] = self.ended_at

    def _pass_on(self, fd: int, pipe: _Pipe) -> bool:
        data = os.read(fd, 65_536)
        text = pipe.decoder.decode(data, final=not data)
        if text:
            self._outlet.take(text, slot=pipe.slot, stream=pipe.stream)
        if not data:
            self._outlet.take("", slot=pipe.slot, stream=pipe.stream)
        return bool(data)

    def _close(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        if isinstance(key.fileobj, int):
            os.close(key.fileobj)
        else:
            cast(BinaryIO, key.fileobj).close()
