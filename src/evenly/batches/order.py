"""Dataset or sampler + seed + epoch -> the order of all samples, the same on every rank."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from evenly.batches.ranges import Ranges
from evenly.batches.rng import RngState, seed_of
from evenly.errors import DataError, SpecError

Order = torch.Tensor | Sequence[object]


class Ordering:
    """The order of the samples of a map-style dataset: its own, shuffled, or a sampler's."""

    def __init__(
        self, dataset: object, *, ranks: int, seed: int, shuffle: bool | None, sampler: Iterable[object] | None
    ) -> None:
        if sampler is not None:
            check_sampler(sampler, shuffle=shuffle)
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._sampler = sampler
        drawn_from = dataset if sampler is None else sampler
        if isinstance(drawn_from, Sized) and len(drawn_from) < ranks:
            source = "dataset has" if sampler is None else "sampler draws"
            raise DataError(
                f"the {source} {len(drawn_from)} samples for {ranks} ranks, so some rank would have none. "
                "Use fewer ranks or more data."
            )

    def size(self) -> int:
        """Returns the number of samples, or raises `TypeError` if the sampler has no length."""
        return len(self._dataset if self._sampler is None else self._sampler)  # type: ignore[arg-type]  # TypeError without a length

    def epoch_size(self, epoch: int) -> int:
        """Returns the number of samples of an epoch."""
        return len(self.of(epoch)) if self._sampler is not None else self.size()

    def of(self, epoch: int) -> Order:
        """Returns the order of an epoch, the same on every rank and every time."""
        if self._sampler is not None:
            return drawn(self._sampler, seed=self._seed, epoch=epoch)
        if self._shuffle is False:
            return range(self.size())
        return torch.randperm(self.size(), generator=torch.Generator().manual_seed(seed_of(self._seed, epoch)))


def drawn(sampler: Iterable[object], *, seed: int, epoch: int) -> list[object]:
    """Returns what a sampler draws in an epoch: it depends only on the seed and the epoch."""
    set_epoch(sampler, epoch)
    number = seed_of(seed, epoch)
    with RngState(number).applied(), _seeded(getattr(sampler, "generator", None), number):
        samples = list(sampler)
    if samples and isinstance(samples[0], list):
        raise SpecError(f"{type(sampler).__name__} draws whole batches: {samples[0]}, ... {_SINGLE}")
    return samples


def taken_from(order: Order, start: int, stop: int) -> list[object]:
    """Returns the samples [start, stop); if there are none, two borrowed ones, as BatchNorm needs two."""
    samples = order[start:stop] if start < stop else order[-2:]
    return samples.tolist() if isinstance(samples, torch.Tensor) else list(samples)


def picked(order: Order, ranges: Ranges) -> Order:
    """Returns the samples at these positions of the order."""
    pieces = [order[start:stop] for start, stop in ranges]
    if isinstance(order, torch.Tensor):
        return torch.cat([torch.as_tensor(piece) for piece in pieces]) if pieces else order[:0]
    return [sample for piece in pieces for sample in piece]


def set_epoch(target: object, epoch: int) -> None:
    """Calls `set_epoch` of a sampler or dataset that has it."""
    if callable(tell := getattr(target, "set_epoch", None)):
        tell(epoch)


def check_sampler(sampler: Iterable[object], *, shuffle: bool | None) -> None:
    """Raises `SpecError` if the sampler cannot give one order to all ranks."""
    name = type(sampler).__name__
    if shuffle:
        raise SpecError(f"shuffle=True and sampler={name} were given, and each makes an order. Leave one out.")
    if isinstance(sampler, DistributedSampler) or (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")):
        raise SpecError(
            f"sampler={name} was given, but it gives each rank a part of the samples, and feed does that already. "
            "Leave it out, or give the sampler of a single process."
        )
    if isinstance(sampler, BatchSampler):
        raise SpecError(f"sampler={name} was given, but it draws whole batches. {_SINGLE}")
    if isinstance(sampler, Iterator) or not isinstance(sampler, Iterable):
        raise SpecError(
            f"sampler={name} was given, but a sampler is read anew each epoch, and this one cannot be. "
            "Give a torch Sampler or a list of indices."
        )


_SINGLE = "The plan says how large batches are. Give a sampler of single indices as sampler=."


@contextmanager
def _seeded(generator: object, seed: int) -> Iterator[None]:
    """Seeds the sampler's own generator inside the block; restores its state afterwards."""
    if not isinstance(generator, torch.Generator):
        yield
        return
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
