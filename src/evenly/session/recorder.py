"""Writes the events of a run to `run.jsonl` on rank 0 and calls the listeners."""

import logging
from collections.abc import Callable
from pathlib import Path

from evenly.errors import CheckpointError
from evenly.session.run_clock import RunClock
from evenly.spec import Event, RunFailed

logger = logging.getLogger(__name__)


class Recorder:
    """The events of one run; only rank 0 writes, every rank may listen."""

    def __init__(self, folder: Path | None, *, rank: int) -> None:
        self.listeners: list[Callable[[Event], None]] = []
        self.run_clock = RunClock()
        self._rank = rank
        self._stream = None
        if folder is not None and rank == 0:
            file = folder / "run.jsonl"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                drop_cut_line(file)
                self._stream = file.open("a", encoding="utf-8")
            except OSError as error:
                raise CheckpointError(
                    f"the run was to be recorded in {file}; that cannot be done: {error.strerror or error}. "
                    "Give a folder that can be written."
                ) from None

    def record(self, kind: Callable[..., Event], **fields: object) -> None:
        """Records an event of `kind` with the current time; only on rank 0."""
        if self._rank:
            return
        event: Event = kind(at_s=self.run_clock.time(), **fields)
        if self._stream is not None:
            self._stream.write(event.model_dump_json() + "\n")
            self._stream.flush()
        for listen in self.listeners:
            listen(event)

    def record_failure(self, step: int, error: BaseException) -> None:
        """Records that the run ended in `error`; a failure to record must not hide it."""
        try:
            self.record(RunFailed, step=step, error=f"{type(error).__name__}: {error}")
        except Exception:
            logger.exception("the failure could not be recorded")

    def close(self) -> None:
        """Closes the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def drop_cut_line(file: Path) -> None:
    """Removes a last line that a crash cut short, so that new events begin on a new line."""
    if file.is_file():
        text = file.read_bytes()
        if text and not text.endswith(b"\n"):
            file.write_bytes(text[: text.rfind(b"\n") + 1])
