"""Stream of samples -> the same samples in the same order, on every rank and in every run."""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from evenly._torch.dataloader import outside_of_workers
from evenly.batches.order import set_epoch
from evenly.batches.ranges import Ranges, size_of, split
from evenly.batches.rng import RngState, seed_of
from evenly.errors import DataError

AT_ONCE = 256  # samples that are read and skipped at a time


class Reader:
    """A stream that is read in order, some samples ahead, with random numbers that depend on seed and epoch only."""

    def __init__(self, dataset: Iterable[object], *, seed: int, epoch: int) -> None:
        set_epoch(dataset, epoch)
        self.position = 0  # samples taken
        self.last: list[object] = []  # the last two, for ranks that get none
        self.name = type(dataset).__name__
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
                f"{self.name} was to be read from sample {offset} on, but {self.position} samples of it are taken "
                "and it can be read once only. Give an iterable whose __iter__ starts anew."
            )
        while self.position < offset and self.take(min(AT_ONCE, offset - self.position)):
            pass


class RangeReader:
    """The samples of some ranges of a stream, read as if they were all there is. Others are skipped."""

    def __init__(self, reader: Reader, ranges: Ranges, *, size: int | None = None) -> None:
        """Reads nothing yet.

        Args:
            reader: of the whole stream, not further than the first range.
            ranges: positions in the stream.
            size: samples that the stream says it has; that it has no more is checked.
        """
        self.position = 0  # samples taken
        self._reader = reader
        self._left = ranges
        self._size = size

    @property
    def last(self) -> list[object]:
        """The last two samples that were read."""
        return self._reader.last

    def fill(self, count: int) -> int:
        """Returns how many samples there are, at most `count`; fewer may come if the stream ends behind a gap."""
        if not self._left:
            return 0
        start, stop = self._left[0]
        self._reader.go_to(start)
        if (ready := self._reader.fill(min(count, stop - start))) < min(count, stop - start):
            return ready
        return min(count, size_of(self._left))

    def take(self, count: int) -> list[object]:
        """Returns the next `count` samples, fewer at the end."""
        wanted, self._left = split(self._left, count)
        samples: list[object] = []
        for start, stop in wanted:
            self._reader.go_to(start)
            samples += self._reader.take(stop - start)
        self.position += len(samples)
        if len(samples) < size_of(wanted):
            self._left = ()
        self._require_end()
        return samples

    def go_to(self, offset: int) -> None:
        """Leaves samples out until `offset` are taken or left out."""
        _, self._left = split(self._left, offset - self.position)
        self.position = max(self.position, offset)

    def _require_end(self) -> None:
        """Raises `DataError` if samples follow the last one of a stream that has a length."""
        if self._size is not None and self._reader.position >= self._size and self._reader.fill(1):
            raise DataError(
                f"{self._reader.name} was to be dealt to nodes by its length of {self._size} samples, but has more. "
                "Correct its __len__, or leave it out."
            )
