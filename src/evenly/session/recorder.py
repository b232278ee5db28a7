"""Writes the events of a run to `run.jsonl` on rank 0 and tells whoever listens."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenly.spec import Event


class Recorder:
    """The events of one run; only rank 0 writes, every rank may listen."""

    def __init__(self, folder: Path | None, *, rank: int) -> None:
        self.listeners: list[Callable[[Event], None]] = []
        self._rank = rank
        self._stream = None
        if folder is not None and rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self._stream = (folder / "run.jsonl").open("a")

    def tell(self, kind: type[Any], **fields: Any) -> None:
        """Makes an event of `kind`, now; only rank 0 tells."""
        if self._rank:
            return
        event: Event = kind(at_s=time.time(), **fields)
        if self._stream is not None:
            self._stream.write(event.model_dump_json() + "\n")
            self._stream.flush()
        for listen in self.listeners:
            listen(event)

    def close(self) -> None:
        """Closes the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
