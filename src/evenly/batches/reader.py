"""Stream of samples -> the same samples in the same order, on every rank and in every run."""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from evenly._torch.dataloader import outside_of_workers
from evenly.batches.order import set_epoch
from evenly.batches.rng import RngState, seed_of
from evenly.errors import DataError

AT_ONCE = 256  # samples that are read and skipped at a time


class Reader:
    """A stream that is read in order, some samples ahead, with random numbers that depend on seed and epoch only."""

    def __init__(self, dataset: Iterable[object], *, seed: int, epoch: int) -> None:
        set_epoch(dataset, epoch)
        self.position = 0  # samples taken
        self.last: list[object] = []  # the last two, for ranks that get none
        self._name = type(dataset).__name__
        self._ahead: deque[object] = deque()
        self._rng_state = RngState(seed_of(seed, epoch))
        with self._rng_state.applied(), outside_of_workers():
            self._samples = iter(dataset)

    def fill(self, count: int) -> int:
        """Reads ahead and returns how many samples there are, at most `count`."""
        if len(self._ahead) < count:
            with self._rng_state.applied(), outside_of_workers():
                self._ahead.extend(islice(self._samples, count - len(self._ahead)))
        return min(count, len(self._ahead))

    def take(self, count: int) -> list[object]:
        """Returns the next `count` samples, fewer at the end."""
        samples = [self._ahead.popleft() for _ in range(self.fill(count))]
        self.position += len(samples)
        self.last = (self.last + samples)[-2:]
        return samples

    def go_to(self, offset: int) -> None:
        """Skips samples until `offset` are taken, or all there are."""
        if self.position > offset:
            raise DataError(
                f"{self._name} was to be read from sample {offset} on, but {self.position} samples of it are taken "
                "and it can be read once only. Give an iterable whose __iter__ starts anew."
            )
        while self.position < offset and self.take(min(AT_ONCE, offset - self.position)):
            pass
