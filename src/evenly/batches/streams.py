"""Stream of samples -> this rank's steps of an epoch. Every rank reads the same stream and takes its parts."""

from collections.abc import Iterable, Iterator, Sequence, Sized

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from evenly.batches.loading import Collate, LoaderOptions
from evenly.batches.parts import Rules, Step, is_step, part_of
from evenly.batches.ranges import Ranges
from evenly.batches.reader import RangeReader, Reader
from evenly.batches.rng import generator_of
from evenly.errors import SpecError

MOST_RANGES = 64  # in a part of a stream

AnyReader = Reader | RangeReader


class Stream:
    """A dataset without indices: an IterableDataset, or anything else that can be iterated over."""

    def __init__(self, dataset: Iterable[object], rules: Rules) -> None:
        loading = rules.loading
        self.has_workers = bool(loading.get("num_workers"))
        self._is_read_once = isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset)
        if self._is_read_once and self.has_workers:
            raise SpecError(
                f"num_workers={loading['num_workers']} was given for a {type(dataset).__name__}, which can be read "
                "once only, but each worker reads the stream. Give an iterable whose __iter__ starts anew, or no "
                "workers."
            )
        self.rules, self._dataset = rules, dataset
        collated = _Collated(loading.get("collate_fn") or default_collate)
        self._loading: LoaderOptions = {**loading, "collate_fn": collated}
        self._reader: Reader | None = None
        self._reader_epoch = -1
        self._persistent: tuple[torch.Tensor, DataLoader[Step]] | None = None  # kept if workers outlive an epoch

    def size(self) -> int:
        """Returns the samples of an epoch if the dataset has a length, or raises `TypeError`."""
        return len(self._dataset)  # type: ignore[arg-type]  # the error is Python's own

    def begin(self, epoch: int) -> "StreamedEpoch":
        """Returns an epoch, to be loaded from any offset."""
        if self.has_workers:
            return StreamedEpoch(self, epoch, None)
        if self._reader is None or not self._is_read_once:
            self._open_reader(epoch)
        return StreamedEpoch(self, epoch, self._reader)

    def epoch_size(self, epoch: int) -> int | None:
        """Returns the samples of an epoch if the dataset has a length."""
        try:
            return self.size()
        except TypeError:
            return None

    def begin_part(self, epoch: int, ranges: Ranges) -> "StreamedEpoch":
        """Returns these positions of an epoch; a stream that is further already is read again from its start."""
        if self.has_workers:
            return StreamedEpoch(self, epoch, None, ranges)
        reader = self._reader
        is_further = reader is not None and (epoch != self._reader_epoch or reader.position > ranges[0][0])
        if reader is None or (is_further and not self._is_read_once):
            reader = self._open_reader(epoch)
        return StreamedEpoch(self, epoch, RangeReader(reader, ranges, size=self.epoch_size(epoch)), ranges)

    def steps(
        self, epoch: int, offset: int, shares: Sequence[int], reader: AnyReader | None, ranges: Ranges = ()
    ) -> Iterator[Step]:
        """Returns the steps from `offset` on; of these positions only, if some are given."""
        position = torch.zeros(3 + 2 * MOST_RANGES + len(shares), dtype=torch.int64)
        position[:3] = torch.tensor([epoch, offset, len(ranges)])
        if ranges:
            position[3 : 3 + 2 * len(ranges)] = torch.tensor(ranges).flatten()
        position[-len(shares) :] = torch.tensor(shares)
        start = ranges[0][0] if ranges else 0
        generator = generator_of(self.rules.seed, epoch, offset=start + offset, rank=self.rules.rank)
        if not self.rules.workers_last:
            return iter(self._open(position, reader, generator))
        if self._persistent is None:
            position.share_memory_()
            self._persistent = position, self._open(position, reader, generator)
        self._persistent[0].copy_(position)
        return iter(self._persistent[1])

    def _open_reader(self, epoch: int) -> Reader:
        self._reader, self._reader_epoch = Reader(self._dataset, seed=self.rules.seed, epoch=epoch), epoch
        return self._reader

    def _open(self, position: torch.Tensor, reader: AnyReader | None, generator: torch.Generator) -> DataLoader[Step]:
        parts = Parts(self._dataset, position, self.rules, reader)
        return DataLoader(parts, batch_size=None, generator=generator, **self._loading)


class StreamedEpoch:
    """The steps of one rank in one pass over a stream."""

    def __init__(self, stream: Stream, epoch: int, reader: AnyReader | None, ranges: Ranges = ()) -> None:
        self._stream = stream
        self._ranges = ranges  # those that are read, if not all samples are
        self._epoch = epoch
        self._reader = reader
        self.shares: tuple[int, ...] | None = None

    def load(self, offset: int, shares: tuple[int, ...]) -> None:
        """Continues after `offset` samples with these shares."""
        self._steps: Iterator[Step] | None = None  # ends the workers and drops their prefetched batches
        self._ahead: Step | None = None
        self._offset, self.shares = offset, shares
        if self._reader is not None:
            self._reader.go_to(offset)

    def more(self) -> bool:
        """Returns whether a step follows. Without workers it is not collated yet: collating may draw random numbers."""
        if self._reader is not None:
            return follows(self._reader, self.shares or (), drop_last=self._stream.rules.drop_last)
        if self._ahead is None:
            self._ahead = next(self._started_steps(), None)
        return self._ahead is not None

    def take(self) -> Step:
        """Returns the step that follows."""
        step = self._ahead or next(self._started_steps())
        self._ahead = None
        return step

    def _started_steps(self) -> Iterator[Step]:
        if self._steps is None:
            self._steps = self._stream.steps(self._epoch, self._offset, self.shares or (), self._reader, self._ranges)
        return self._steps


class Parts(IterableDataset[Step]):
    """The steps of one rank, not collated yet; each worker reads the whole stream and yields every n-th step.

    `position` says where to start: epoch, offset, number of ranges, ranges, shares. It is a tensor so that persistent
    workers see changes.
    """

    def __init__(
        self, dataset: Iterable[object], position: torch.Tensor, rules: Rules, reader: AnyReader | None
    ) -> None:
        self._dataset = dataset
        self._position = position
        self._rules = rules
        self._reader = reader  # already opened; workers open their own

    def __iter__(self) -> Iterator[Step]:
        info = get_worker_info()
        turn, turns = (info.id, info.num_workers) if info is not None else (0, 1)
        epoch, offset, num_ranges, *numbers = self._position.tolist()
        shares = numbers[2 * MOST_RANGES :]
        reader = self._reader or self._open(epoch, numbers[: 2 * num_ranges])
        reader.go_to(offset)
        number = 0
        while follows(reader, shares, drop_last=self._rules.drop_last):
            step = self._step(reader, shares)
            if number % turns == turn:
                yield step
            number += 1

    def _open(self, epoch: int, edges: list[int]) -> AnyReader:
        reader = Reader(self._dataset, seed=self._rules.seed, epoch=epoch)
        if not edges:
            return reader
        size = len(self._dataset) if isinstance(self._dataset, Sized) else None
        return RangeReader(reader, tuple(zip(edges[::2], edges[1::2], strict=True)), size=size)

    def _step(self, reader: AnyReader, shares: Sequence[int]) -> Step:
        samples = reader.take(sum(shares))
        start, stop = part_of(len(samples), shares, self._rules.rank)
        return reader.position, stop - start, samples[start:stop] or reader.last


class _Collated:
    """Makes a batch of the samples of a step."""

    def __init__(self, collate_fn: Collate) -> None:
        self._collate_fn = collate_fn

    def __call__(self, step: Step) -> Step:
        stop, samples, batch = step
        return stop, samples, self._collate_fn(batch)


def follows(reader: AnyReader, shares: Sequence[int], *, drop_last: bool) -> bool:
    """Returns whether the stream has another step."""
    batch_size = sum(shares)
    return is_step(reader.fill(batch_size), batch_size, start=reader.position, drop_last=drop_last)
