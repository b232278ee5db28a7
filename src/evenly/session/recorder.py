"""Writes the events of a run to `run.jsonl` on rank 0 and calls the listeners."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from evenly.errors import CheckpointError, CheckpointWriteError
from evenly.session.run_clock import RunClock
from evenly.spec import Event, ExchangeDone, RunFailed

logger = logging.getLogger(__name__)

WRITE_S = 1.0  # exchanges are written at most this often, all other events at once
MOST_UNWRITTEN_BYTES = 2**22  # lines that could not be written are kept for later up to this


class Recorder:
    """The events of one run; only rank 0 writes them and calls the listeners.

    Exchanges can be frequent: their lines are made together, once a second, when their code is in the processor's
    cache. Any other event writes them first, so that the order of events is kept.
    """

    def __init__(self, folder: Path | None, *, rank: int) -> None:
        self.listeners: list[Callable[[Event], None]] = []
        self.run_clock = RunClock()
        self.is_main = rank == 0
        self.is_optional = False  # whether the run goes on while its record cannot be written
        self._rank = rank
        self._stream = None
        self._pending: list[tuple[float, dict[str, object]]] = []  # times and fields of exchanges not yet written
        self._written_at = 0.0
        self._unwritten = b""  # lines that could not be written
        if folder is not None and rank == 0:
            file = folder / "run.jsonl"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                drop_cut_line(file)
                self._stream = file.open("ab", buffering=0)
            except OSError as error:
                raise CheckpointError(
                    f"the run was to be recorded in {file}; that cannot be done: {error.strerror or error}. "
                    "Give a folder that can be written."
                ) from None

    def record(self, kind: Callable[..., Event], **fields: object) -> None:
        """Records an event of `kind` with the current time; only on rank 0."""
        if self._rank:
            return
        at_s = self.run_clock.time()
        event: Event | None = None
        if self._stream is not None:
            if kind is ExchangeDone:
                self._pending.append((at_s, fields))
                if self.run_clock.monotonic() - self._written_at > WRITE_S:
                    self._write()
            else:
                event = kind(at_s=at_s, **fields)
                self._write(event)
        if self.listeners:
            event = event or kind(at_s=at_s, **fields)
            for listen in self.listeners:
                listen(event)

    def flush(self) -> None:
        """Writes what is pending: before a checkpoint, so that a run that resumes from it has a record of its steps."""
        self._write()

    def _write(self, last: Event | None = None) -> None:
        """Writes the exchanges that are pending, then `last`."""
        events: list[Event] = [ExchangeDone(at_s=at_s, **fields) for at_s, fields in self._pending]
        self._pending = []
        events += [] if last is None else [last]
        self._written_at = self.run_clock.monotonic()
        if events and self._stream is not None:
            self._append(self._stream, "".join(event.model_dump_json() + "\n" for event in events).encode())

    def _append(self, stream: FileIO, lines: bytes) -> None:
        """Appends whole lines, with those that could not be written before."""
        lines, before = self._unwritten + lines, self._unwritten
        size_bytes = os.fstat(stream.fileno()).st_size
        try:
            written = 0
            while written < len(lines):
                written += stream.write(lines[written:])
            self._unwritten = b""
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(stream.fileno(), size_bytes)  # no part of a line stays
            case = f"the run was to be recorded in {stream.name}, but {error.strerror or error}"
            if not self.is_optional:
                raise CheckpointWriteError(f"{case}. Make room there, or let this program write.") from error
            if not before:
                logger.warning("%s. The run goes on, and its record, too, once it can be written.", case)
            self._unwritten = lines if len(lines) <= MOST_UNWRITTEN_BYTES else b"\n"  # an empty line is no event

    def record_failure(self, step: int, error: BaseException) -> None:
        """Records that the run ended in `error`; a failure to record must not hide it."""
        try:
            self.record(RunFailed, step=step, error=f"{type(error).__name__}: {error}")
        except Exception:
            logger.exception("the failure could not be recorded")

    def close(self) -> None:
        """Writes what is pending and closes the file."""
        if self._stream is not None:
            try:
                self._write()
            finally:
                self._stream.close()
                self._stream = None


def drop_cut_line(file: Path) -> None:
    """Removes a last line that a crash cut short, so that new events begin on a new line."""
    if file.is_file():
        text = file.read_bytes()
        if text and not text.endswith(b"\n"):
            file.write_bytes(text[: text.rfind(b"\n") + 1])
