"""Writes a checkpoint in a thread of its own, on all ranks together, while training goes on.

The ranks agree through the store, because collectives belong to the training thread: a checkpoint gets its name only
when every rank has written its files.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from evenly.checkpoints import folder
from evenly.checkpoints.best import KeptCheckpoints
from evenly.checkpoints.folder import CopiedPart
from evenly.checkpoints.ownership import FolderOwner
from evenly.checkpoints.votes import together
from evenly.comm import StoreGatherer
from evenly.errors import CheckpointError

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass
class CheckpointWriter:
    """What one rank writes of a checkpoint, and the agreement of all ranks on it."""

    path: Path  # the checkpoint once it is complete
    token: str
    rank: int
    leads: bool  # whether this is the first rank of a node
    parts: list[CopiedPart]
    failure: BaseException | None  # why this rank has no copy of its state
    manifest: dict[str, Any]  # but for the files
    keep: KeptCheckpoints
    best: list[str]
    owner: FolderOwner | None
    gatherer: StoreGatherer
    _has_made: bool = field(default=False, init=False)

    def write(self) -> None:
        """Writes, completes and clears; if a rank fails, all raise, and nothing has the checkpoint's name."""
        partial_folder = self.path.with_name(f".{self.path.name}.{self.token}")
        try:
            self._make(partial_folder)
            rows = self._together(lambda: self._write_parts(partial_folder), "write the checkpoint", self.path)
            self._together(partial(self._complete, partial_folder, rows), "complete the checkpoint", self.path)
        except CheckpointError:
            if self._has_made:  # a disk may be full
                shutil.rmtree(partial_folder, ignore_errors=True)
            raise
        self._together(self._clear, "clear", self.path.parent)

    def _make(self, partial_folder: Path) -> None:
        """Makes the folder to write into; the rank that does so owns it (each file system has one such rank)."""

        def make(is_turn: bool) -> None:
            if isinstance(self.failure, Exception):
                raise self.failure
            if self.failure is not None:
                raise CheckpointError(f"it was interrupted by {self.failure!r}")
            if not is_turn:
                return
            try:
                folder.make(partial_folder)
            except FileExistsError:
                if not self.rank:
                    raise
                return  # rank 0's, or that of another node on this file system
            self._has_made = True
            folder.clear_partial(partial_folder.parent, but=partial_folder)

        for is_turn in (self.rank == 0, self.leads and self.rank != 0):
            self._together(partial(make, is_turn), "make the folder", partial_folder)

    def _write_parts(self, partial_folder: Path) -> tuple[dict[str, str], dict[str, int]]:
        """Returns the SHA-256 and the bytes of this rank's files."""
        digests: dict[str, str] = {}
        while self.parts:  # each is freed once it is written
            digests |= folder.write_part(partial_folder, self.parts.pop(0))
        if self.rank == 0:
            self.keep.write(self.path.parent)
        return digests, {name: (partial_folder / name).stat().st_size for name in digests}

    def _complete(self, partial_folder: Path, rows: list[tuple[dict[str, str], dict[str, int]]]) -> None:
        if not self._has_made:
            return
        if self.owner is not None:
            self.owner.require()
        files = {name: digest for digests, _ in rows for name, digest in digests.items()}
        sizes = {name: size for _, sizes in rows for name, size in sizes.items()}
        folder.seal(partial_folder, self.path, {**self.manifest, "files": files, "sizes": sizes})

    def _clear(self) -> None:
        if self._has_made:
            folder.clear(self.path.parent, keep=self.keep.newest, best=self.best)

    def _together(self, act: Callable[[], T], action: str, path: Path) -> list[T]:
        return together(lambda value, what: self.gatherer.gather(value, f"{what} {path}"), act, action, path)


class PendingCheckpoint:
    """A checkpoint that is being written by a thread of this rank."""

    def __init__(self, path: Path, step: int, write: Callable[[], None], *, began: float) -> None:
        """Starts to `write`; the copy of the state began at `began`, by the monotonic clock."""
        self.path, self.step = path, step
        self.seconds = 0.0  # from the beginning of the copy until it was complete, or had failed
        self.held_s = 0.0  # in which training waited for it
        self._began = began
        self._error: Exception | None = None
        self._done = threading.Event()
        # The end of the process waits for it: a thread inside of the store would abort that.
        threading.Thread(target=self._run, args=(write,), name="evenly-checkpoint", daemon=False).start()

    @property
    def has_ended(self) -> bool:
        """Whether it is complete, or has failed."""
        return self._done.is_set()

    def ends_within(self, seconds: float) -> bool:
        """Returns whether it ends within so many seconds."""
        return self._done.wait(seconds)

    def result(self) -> Path:
        """Returns the folder, once it has ended; raises the error that it ended with, which is that of all ranks."""
        if self._error is not None:
            raise self._error
        return self.path

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self._error = error
        self.seconds = time.monotonic() - self._began
        self._done.set()
