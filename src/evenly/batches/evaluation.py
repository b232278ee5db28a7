"""A dataset -> this rank's part of it for evaluation: over all ranks every sample once, and none is borrowed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from evenly.batches.data_loaders import Samples, without_loader
from evenly.batches.device import to_device
from evenly.batches.indexed import IndexedSource
from evenly.batches.loading import FeedOptions
from evenly.batches.order import taken_from
from evenly.batches.parts import Rules, Source, part_of
from evenly.batches.sources import open_source
from evenly.errors import DataError, SpecError
from evenly.spec import Plan, deal

BATCH_SIZE = 32  # where neither the program nor a plan says how large batches are


@dataclass(frozen=True)
class EvaluationPart:
    """What a rank takes of an evaluation: in proportion to `shares`, in batches of at most `shares[taker]`."""

    taker: int
    shares: tuple[int, ...]
    counts: bool = True  # False on all but the first of the ranks that hold one network, which take the same batches


def evaluation_part(plan: Plan | None, *, rank: int, ranks: int, batch_size: int | None) -> EvaluationPart:
    """Returns the part of a rank: in proportion to the plan's samples if there is one, else equal.

    >>> evaluation_part(None, rank=1, ranks=2, batch_size=8)
    EvaluationPart(taker=1, shares=(8, 8), counts=True)
    """
    if batch_size is not None and batch_size < 1:
        raise SpecError(f"batch_size={batch_size} was asked for; a batch has at least 1 sample. Give 1 or more.")
    if plan is None or not all(plan.batch_shares):
        return EvaluationPart(rank, (batch_size or BATCH_SIZE,) * ranks)
    replica = plan.replica_of(rank)
    taker = rank if replica is None else replica.ranks[0]
    shares = tuple(plan.batch_shares)
    if batch_size is not None:  # of the rank that takes most
        shares = tuple(max(1, round(batch_size * share / max(shares))) for share in shares)
    return EvaluationPart(plan.takers.index(taker), shares, counts=taker == rank)


class EvaluationFeed:
    """An iterable over this rank's part of a dataset; each pass has the same order.

    Of a map-style dataset a rank takes consecutive samples: the batches of rank 0, then those of rank 1, and so on are
    the dataset in its order. Ranks may have unequal numbers of batches, also none. `samples` is the number of samples
    that this rank counts in the batch yielded last: 0 on all but the first of the ranks that hold one network.
    """

    def __init__(
        self,
        dataset: Samples,
        part: Callable[[], EvaluationPart],
        *,
        device: torch.device | None = None,
        **loading: Unpack[FeedOptions],
    ) -> None:
        """`part` is asked at every pass: a session knows the ranks that take part only once a model is prepared."""
        self.samples = 0
        self._part = part
        self._device = device
        self._dataset, self._options = without_loader(dataset, loading)
        if self._options.pop("drop_last", False):
            raise DataError(
                "drop_last=True was given for an evaluation, in which every sample comes once. Leave it out."
            )
        self._options.setdefault("shuffle", False)
        self._opened: tuple[EvaluationPart, Source] | None = None
        self._open()

    def __len__(self) -> int:
        """Returns the number of this rank's batches; `TypeError` for a stream without a length."""
        part, source = self._open()
        if isinstance(source, IndexedSource):
            return len(_batches(source, part))
        whole, remainder = divmod(source.size(), sum(part.shares))
        start, stop = part_of(remainder, part.shares, part.taker)
        return whole + (stop > start)

    def __iter__(self) -> Iterator[Any]:
        part, source = self._open()
        pairs = _indexed(source, part) if isinstance(source, IndexedSource) else self._streamed(source, part)
        for samples, batch in pairs:
            self.samples = samples if part.counts else 0
            yield batch if self._device is None else to_device(batch, self._device)

    def _open(self) -> tuple[EvaluationPart, Source]:
        part = self._part()
        if self._opened is None or self._opened[0] != part:
            options = self._options.copy()
            shuffle, sampler = options.pop("shuffle"), options.pop("sampler", None)
            rules = Rules(rank=part.taker, ranks=1, seed=options.pop("seed", 0), drop_last=False, loading=options)
            self._opened = part, open_source(self._dataset, rules, shuffle=shuffle, sampler=sampler)
        return self._opened

    def _streamed(self, source: Source, part: EvaluationPart) -> Iterator[tuple[int, object]]:
        """Yields the batches of a rank that has samples in them, with their numbers."""
        epoch = source.begin(0)
        epoch.load(0, part.shares)
        if not epoch.more():
            raise DataError(
                f"an evaluation of {type(self._dataset).__name__} was requested, but it has no samples. Give an "
                "iterable whose __iter__ starts anew."
            )
        while epoch.more():
            _, samples, batch = epoch.take()
            if samples:
                yield samples, batch


def _indexed(source: IndexedSource, part: EvaluationPart) -> Iterator[tuple[int, object]]:
    """Yields the batches of a rank with their numbers of samples."""
    indices = _batches(source, part)
    if indices:
        loaded = source.batches(iter(indices), epoch=0, offset=0)
        yield from ((len(samples), batch) for samples, batch in zip(indices, loaded, strict=True))


def _batches(source: IndexedSource, part: EvaluationPart) -> list[list[object]]:
    """Returns the indices of each batch of a rank."""
    order, most = source.order(0), part.shares[part.taker]
    counts = deal(len(order), part.shares)
    start = sum(counts[: part.taker])
    stop = start + counts[part.taker]
    return [taken_from(order, begin, min(begin + most, stop)) for begin in range(start, stop, most)]
