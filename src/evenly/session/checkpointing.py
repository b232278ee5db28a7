"""When a run's checkpoints are saved, and what becomes of one that cannot be written."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from evenly.checkpoints.best import KeptCheckpoints
from evenly.checkpoints.full_state import TrainedModel
from evenly.checkpoints.saving import Checkpoints
from evenly.checkpoints.states import Stateful
from evenly.checkpoints.writing import PendingCheckpoint
from evenly.errors import CheckpointWriteError, SpecError
from evenly.session.counters import Counters
from evenly.session.recorder import Recorder
from evenly.spec import CheckpointFailed, CheckpointSaved

logger = logging.getLogger(__name__)

OnError = Literal["raise", "warn"]


class SaveCheckpoint(Protocol):
    """Saves a checkpoint on all ranks together."""

    def __call__(self, ended_epochs: int | None = None, *, wait: bool = True) -> Path | None:
        """Returns its folder; None if it could not be written, and the run goes on.

        With `ended_epochs` it marks the run as ended in a loop over so many epochs. Without `wait` it need not be
        complete yet.
        """


class CheckpointSaver:
    """Saves the checkpoints of a run: the state is copied between two steps, and a thread writes the copy.

    Args:
        checkpoints: those of the run.
        trained_models: what is saved; all may not be prepared yet.
        tracked: what is saved besides.
        counters: of the run.
        recorder: of the run.
        keep: which checkpoints stay.
        is_async: whether training goes on while the copy is written.
        on_error: what follows if a checkpoint cannot be written.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        trained_models: list[TrainedModel],
        tracked: Mapping[str, Stateful],
        counters: Counters,
        recorder: Recorder,
        *,
        keep: KeptCheckpoints,
        is_async: bool,
        on_error: OnError,
    ) -> None:
        self._checkpoints = checkpoints
        self._trained_models, self._tracked = trained_models, tracked
        self._counters, self._recorder = counters, recorder
        self._keep = keep
        self._is_async = is_async
        self._on_error = on_error
        self._pending: PendingCheckpoint | None = None

    def save(self, epoch: int, *, ended_epochs: int | None, wait: bool) -> Path | None:
        """Saves the run at its current step; arguments and result as those of `SaveCheckpoint`."""
        self.settle()
        for trained_model in self._trained_models:
            trained_model.model.prepare_checkpoint()
        self._recorder.flush()
        self._counters.flush()
        step = self._counters.step
        try:
            self._pending = self._checkpoints.start(
                step, self._trained_models, self._tracked, epoch=epoch, keep=self._keep, ended_epochs=ended_epochs
            )
        except CheckpointWriteError as error:
            self._fail(step, error)
            return None
        return self.settle() if wait or not self._is_async else self._pending.path

    def look(self) -> None:
        """Records the checkpoint that was being written, if it has ended; called between two steps."""
        if self._pending is not None and self._pending.has_ended:
            self._tell()

    def settle(self) -> Path | None:
        """Waits for the checkpoint that is being written and records it; all ranks call it together.

        Returns its folder; None if there is none, or it could not be written, and the run goes on.
        """
        self._checkpoints.wait()
        return self._tell()

    def _tell(self) -> Path | None:
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            path = pending.result()
        except CheckpointWriteError as error:
            self._fail(pending.step, error)
            return None
        seconds, held_s = pending.seconds, min(pending.held_s, pending.seconds)
        self._recorder.record(CheckpointSaved, step=pending.step, path=str(path), seconds=seconds, held_s=held_s)
        return path

    def close(self) -> None:
        """Waits for the checkpoint that is being written, also after a failure; raises nothing of it."""
        self._checkpoints.close()
        try:
            self._tell()
        except Exception as error:
            logger.warning("the last checkpoint is not complete: %s", error)

    def _fail(self, step: int, error: CheckpointWriteError) -> None:
        if self._on_error == "raise":
            raise error
        self._recorder.record(CheckpointFailed, step=step, error=str(error))
        if self._recorder.is_main:
            logger.warning("the run goes on without a checkpoint of step %d: %s", step, error)


def require_saving(*, checkpoint_async: object, checkpoint_errors: object) -> None:
    """Raises `SpecError` for settings of checkpoints that a session does not know."""
    if not isinstance(checkpoint_async, bool):
        raise SpecError(
            f"checkpoint_async={str(checkpoint_async)[:40]!r} was given, which is no truth value. Give True or False."
        )
    if checkpoint_errors not in ("raise", "warn"):
        raise SpecError(
            f"checkpoint_errors={str(checkpoint_errors)[:40]!r} was given, which is unknown. Give 'raise', which ends "
            "the run, or 'warn', with which it goes on."
        )
