"""The loop over the epochs of a run, and how it ends: after its last epoch, early, or by a signal."""

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from evenly.checkpoints.full_state import TrainedModel
from evenly.errors import SpecError
from evenly.session.checkpointing import SaveCheckpoint
from evenly.session.counters import Counters
from evenly.session.loop_exit import was_left_by_break
from evenly.session.recorder import Recorder
from evenly.session.stopping import RunInterrupted, StopAgreement, stopping_on_signals
from evenly.spec import EpochDone, RunStopped

logger = logging.getLogger(__name__)


class EpochLoop:
    """Yields epochs, saves at their ends or between steps, and ends the run.

    Args:
        trained_models: the models of the run; all may not be prepared yet.
        stopping: the agreement of the ranks on an early end.
        save: saves a checkpoint, if the run has a folder.
        saves_every: a number of steps, `"epoch"`, or None: no checkpoints but those that are asked for.
        report: reports an error to the other ranks.
        is_main: whether this is rank 0.
    """

    def __init__(
        self,
        trained_models: Sequence[TrainedModel],
        counters: Counters,
        recorder: Recorder,
        *,
        stopping: StopAgreement,
        save: SaveCheckpoint | None,
        saves_every: int | Literal["epoch"] | None,
        report: Callable[[BaseException], None],
        is_main: bool,
    ) -> None:
        self.epoch = 0
        self.saved_step = counters.step  # of the last checkpoint
        self.has_ended = False  # finished or stopped early, in this start or before it
        self.is_interrupted = False  # by a signal
        self.stopping = stopping
        self._trained_models = trained_models
        self._counters = counters
        self._recorder = recorder
        self._save = save
        self._saves_every = None if save is None else saves_every
        self._report = report
        self._is_main = is_main
        self._is_stopped = self._has_begun = False
        self._error: BaseException | None = None  # of a loop that was left by break, which cannot raise it

    def require_first(self) -> None:
        """Raises `SpecError` for a second loop: the first one has ended the run, or is around it."""
        if self._has_begun:
            raise SpecError(
                "epochs() was called a second time in a session, but its first loop ends the run. Use one loop over "
                "all epochs, and let the epoch decide what is done: `if epoch >= 3: unfreeze()`."
            )
        self._has_begun = True

    def run(self, count: int) -> Iterator[int]:
        """Yields the epochs up to `count`, and ends the run."""
        with stopping_on_signals(self._stop_by_signal):
            try:
                while self.epoch < count and not self.has_ended and not self._is_stopped:
                    for trained_model in self._trained_models:
                        if trained_model.feed is not None:
                            trained_model.feed.epoch = self.epoch
                    yield self.epoch
                    if not self._is_stopped:
                        self._end_epoch(count)
            except GeneratorExit:
                if was_left_by_break():
                    self._end_left_loop(count)
                raise
            if not self.has_ended:
                self._end_loop(count)

    def between_steps(self) -> None:
        """Saves after every `saves_every` steps, once per step: a step may take several batches.

        Ends the epoch if all ranks stop after this step.
        """
        for trained_model in self._trained_models:
            trained_model.model.advance_after_skipped_step()
        every, step = self._saves_every, self._counters.step
        if self._save is not None and isinstance(every, int) and step % every == 0 and step > self.saved_step:
            self._save(wait=False)
        if self.stopping.is_reached(step):
            self._is_stopped = True
            for trained_model in self._trained_models:
                if trained_model.feed is not None:
                    trained_model.feed.ends_early = True

    def require_ended(self) -> None:
        """Raises the error of a loop that was left by break, if there is one."""
        if self._error is not None:
            raise self._error

    def _stop_by_signal(self, number: int) -> None:
        self.stopping.request(signal.Signals(number).name, signal_number=number)

    def _end_epoch(self, count: int) -> None:
        self.epoch += 1
        for trained_model in self._trained_models:
            trained_model.model.end_epoch(self.epoch)
            if trained_model.feed is not None:
                trained_model.feed.resume({"epoch": self.epoch, "offset": 0})
        self._recorder.record(EpochDone, epoch=self.epoch, step=self._counters.step)
        if self.epoch == count:
            return  # the end of the run saves
        if self._save is not None and self._saves_every == "epoch":
            self._save(wait=False)
        self.between_steps()

    def _end_loop(self, count: int) -> None:
        """Ends a loop that made all its epochs, or that stop() or a signal has stopped."""
        reason, number = str(self.stopping.reason), self.stopping.signal_number
        if not self._is_stopped:
            self._end_run(count)
        elif number is None:
            self._end_run(count)
            self._record_stop(reason)
        else:
            self._interrupt(reason, number)

    def _interrupt(self, reason: str, number: int) -> None:
        """Saves without an exchange, so that a second start continues bit for bit, and ends the program."""
        self.is_interrupted = True
        place = "nothing is saved without a folder"
        if self._save is not None:
            path = self._save()
            place = "nothing could be saved" if path is None else f"saved in {path}"
        self._record_stop(f"{reason}; a second start resumes here")
        if self._is_main:
            logger.warning("stopped by %s after step %d; %s", reason, self._counters.step, place)
        raise RunInterrupted(number)

    def _end_left_loop(self, count: int) -> None:
        """Ends a loop that was left by `break` or `return`; an error is raised later, since here it would be lost."""
        feeds = [trained_model.feed for trained_model in self._trained_models if trained_model.feed is not None]
        try:
            if all(feed.epoch > self.epoch for feed in feeds):  # all batches of this epoch were taken
                self.epoch += 1
                self._recorder.record(EpochDone, epoch=self.epoch, step=self._counters.step)
            self._end_run(count)
            self._record_stop("the program left the loop over epochs")
        except BaseException as error:
            self._report(error)
            self._error = error

    def _end_run(self, count: int) -> None:
        """Makes the last exchange and the last checkpoint."""
        for trained_model in self._trained_models:
            trained_model.model.finish()
        self.has_ended = True
        if self._save is not None and self._saves_every is not None:
            self._save(count)

    def _record_stop(self, reason: str) -> None:
        self._recorder.record(RunStopped, epoch=self.epoch, step=self._counters.step, reason=reason)
