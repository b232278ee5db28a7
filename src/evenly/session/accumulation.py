"""Gradient accumulation: several batches make one step, each weighted by its samples."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from evenly.checkpoints.full_state import TrainedModel
from evenly.errors import SpecError
from evenly.session.planning import require_count


class AccumulatedBatch:
    """One batch of several that make a step; `is_last` says whether the step follows."""

    def __init__(self, accumulation: "Accumulation", *, is_last: bool) -> None:
        self.is_last = is_last
        self.has_backward = False
        self._accumulation = accumulation
        self._weight: float | None = None

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of a loss, which is a mean over this batch, with the weight of its samples.

        After it the gradients are those of the mean over all samples since the last step.
        """
        if self._weight is None:
            self._weight = self._accumulation.weigh()
        self.has_backward = True
        (loss * self._weight).backward()


class Accumulation:
    """Counts the batches and samples since the last step.

    With the samples n_i of this rank's i-th batch and S_i = n_1 + ... + n_i, gradients become
    g <- (S_{i-1} / S_i) g + (n_i / S_i) grad(loss_i), the mean over all samples so far. Averaging over ranks weights
    them by S_i, so that the step uses the mean over the samples of all ranks.
    """

    def __init__(self, trained_models: Sequence[TrainedModel]) -> None:
        self._trained_models = trained_models  # more may be added later
        self._batches = 0
        self._samples = 0.0
        self._place = (-1, -1)  # the step and the epoch in which the first batch began
        self._is_complete = True

    @contextmanager
    def batch(self, count: int, *, is_last: bool) -> Iterator[AccumulatedBatch]:
        """Opens one of `count` batches; gradients are averaged with other ranks in the last one only."""
        if not self._trained_models:
            raise SpecError("accumulate was called before prepare. Prepare the model first.")
        require_count("accumulate()", count, least=1)
        feeds = [trained.feed for trained in self._trained_models if trained.feed is not None]
        place = (self._trained_models[0].model.schedule.step, feeds[0].epoch if feeds else 0)
        if self._is_complete or place != self._place:  # alike on all ranks that share gradients
            self._batches, self._samples = 0, 0.0
            self._place = place
        self._batches += 1
        self._is_complete = is_last or self._batches >= count or any(feed.is_at_end for feed in feeds)
        with ExitStack() as paused:
            for trained in self._trained_models:
                trained.model.batch_samples = None
                if not self._is_complete:
                    paused.enter_context(trained.model.no_sync())
            batch = AccumulatedBatch(self, is_last=self._is_complete)
            yield batch
        if not batch.has_backward and any(trained.model.batch_samples is not None for trained in self._trained_models):
            raise SpecError(
                "the model was called in a block of session.accumulate, but the block ended without batch.backward(): "
                "its gradients are missing, or not weighted by the samples of the batch. Call batch.backward(loss) in "
                "place of loss.backward(), or evaluate under torch.no_grad()."
            )

    def weigh(self) -> float:
        """Adds the samples of the current batch: scales the gradients so far, and returns the weight of its loss."""
        counts = (trained.model.batch_samples for trained in self._trained_models)
        samples = next((count for count in counts if count is not None), None)
        if samples is None:
            raise SpecError(
                "backward of an accumulated batch was called, but the prepared model was not called inside the block. "
                "Call it after `with session.accumulate(n) as batch`."
            )
        gradients = self._gradients()
        before = self._samples if gradients else 0.0  # gradients that were reset count nothing
        self._samples = before + samples
        if not self._samples:
            return 1.0  # a borrowed batch adds nothing by itself
        if before and samples:
            for gradient in gradients:
                gradient.mul_(before / self._samples)
        return samples / self._samples

    def _gradients(self) -> list[torch.Tensor]:
        return [gradient for trained in self._trained_models for gradient in trained.model.gradients()]
