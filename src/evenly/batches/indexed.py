"""Map-style dataset + order -> this rank's steps of an epoch."""

from collections.abc import Iterator

from torch.utils.data import DataLoader, Dataset

from evenly.batches.order import Order, Ordering, picked, taken_from
from evenly.batches.parts import Rules, Step, is_step, part_of
from evenly.batches.ranges import Ranges
from evenly.batches.rng import generator_of


class IndexedSource:
    """A map-style dataset whose samples are picked in one order an epoch."""

    def __init__(self, dataset: Dataset[object], ordering: Ordering, rules: Rules) -> None:
        self.size, self.epoch_size, self.rules = ordering.size, ordering.epoch_size, rules
        self._dataset, self.order = dataset, ordering.of
        self._current = _Current()
        self._persistent_loader: DataLoader[object] | None = None  # kept if workers outlive an epoch
        self._drawn: tuple[int, Order] | None = None  # the epoch that parts are taken of, and its order

    def begin(self, epoch: int) -> "IndexedEpoch":
        """Returns an epoch, to be loaded from any offset."""
        return IndexedEpoch(self, epoch, self.order(epoch))

    def begin_part(self, epoch: int, ranges: Ranges) -> "IndexedEpoch":
        """Returns these positions of an epoch as if they were all of it."""
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self.order(epoch)
        return IndexedEpoch(self, epoch, picked(self._drawn[1], ranges), start=ranges[0][0])

    def batches(self, indices: Iterator[list[object]], *, epoch: int, offset: int) -> Iterator[object]:
        """Returns the batches of these indices; the workers' random numbers depend on epoch, offset and rank."""
        rules = self.rules
        generator = generator_of(rules.seed, epoch, offset=offset, rank=rules.rank)
        if not rules.workers_last:
            return iter(DataLoader(self._dataset, batch_sampler=indices, generator=generator, **rules.loading))
        self._current.indices = indices
        if self._persistent_loader is None:
            self._persistent_loader = DataLoader(
                self._dataset, batch_sampler=self._current, generator=generator, **rules.loading
            )
        return iter(self._persistent_loader)


class IndexedEpoch:
    """The steps of one rank in one order of samples."""

    def __init__(self, source: IndexedSource, epoch: int, order: Order, *, start: int = 0) -> None:
        self._source = source
        self._start = start  # in the epoch
        self._epoch = epoch
        self._order = order
        self.shares: tuple[int, ...] | None = None

    def load(self, offset: int, shares: tuple[int, ...]) -> None:
        """Continues after `offset` samples with these shares."""
        self._batches: Iterator[object] | None = None  # ends the workers and drops their prefetched batches
        self._offset, self.shares = offset, shares
        self._spans = self._steps()
        self._next = next(self._spans, None)

    def more(self) -> bool:
        """Returns whether a step follows."""
        return self._next is not None

    def take(self) -> Step:
        """Returns the step that follows."""
        stop, begin, end = self._next or next(self._spans)
        if self._batches is None:
            indices = (taken_from(self._order, *span) for _, *span in self._steps())
            self._batches = self._source.batches(indices, epoch=self._epoch, offset=self._start + self._offset)
        batch = next(self._batches)
        self._next = next(self._spans, None)
        return stop, end - begin, batch

    def _steps(self) -> Iterator[tuple[int, int, int]]:
        """Yields the end of each step in the order, and the begin and end of this rank's part."""
        start, shares, rules = self._offset, self.shares or (), self._source.rules
        batch_size, size = sum(shares), len(self._order)
        while is_step(count := min(batch_size, size - start), batch_size, start=start, drop_last=rules.drop_last):
            begin, end = part_of(count, shares, rules.rank)
            yield start + count, start + begin, start + end
            start += count


class _Current:
    """The indices that a persistent loader iterates over now."""

    indices: Iterator[list[object]] = iter(())

    def __iter__(self) -> Iterator[list[object]]:
        return self.indices
