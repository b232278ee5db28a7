"""Dataset + Plan -> this rank's batches: one global order, every sample once, equal numbers of steps on all ranks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from evenly._errors import DataError
from evenly.comm import party_of
from evenly.spec import Plan, deal


class Feed:
    """An iterable over this rank's part of every global batch.

    Each epoch has one order of all samples, the same on every rank. Step by step each rank takes its samples of the
    next global batch; a last, smaller batch is split in the same proportions. `samples` is the real size of the batch
    handed out last: 0 where nothing was left for this rank and it got a borrowed sample, to take part in the step.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        rank: int,
        samples: Sequence[int],
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.epoch = 0
        self.offset = 0  # samples of this epoch that all ranks together have taken
        self.samples = 0
        self.between: list[Callable[[], None]] = []  # called when a step is over and another follows
        self.on_end: list[Callable[[], None]] = []
        self._device = device
        self._dataset, self._rank, self._shares = dataset, rank, list(samples)
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._num_workers, self._collate_fn, self._pin_memory = num_workers, collate_fn, pin_memory
        self._size = _size_of(dataset, ranks=len(self._shares))
        if not 0 <= rank < len(self._shares):
            raise DataError(
                f"the batches of rank {rank} were asked for, but the plan is for {len(self._shares)} ranks, counted "
                "from 0. Make a plan for the ranks that run."
            )

    @property
    def global_batch(self) -> int:
        """The samples of all ranks in one step."""
        return sum(self._shares)

    def __len__(self) -> int:
        """Returns the number of steps in an epoch, the same on every rank."""
        whole, rest = divmod(self._size, self.global_batch)
        return whole + (rest > 0 and not (self._drop_last and whole))

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        parts = [(stop, *self._part(start, stop)) for start, stop in self._steps()]
        indices = [self._take(order, first, last) for _, first, last in parts]
        batches = iter(self._load(indices))
        for number, (stop, first, last) in enumerate(parts):
            for tell in self.between if number else ():
                tell()
            batch = next(batches)
            self.offset, self.samples = stop, last - first
            yield batch if self._device is None else to_device(batch, self._device)
        self.offset = 0
        self.epoch += 1
        for tell in self.on_end:
            tell()

    def state(self) -> dict[str, int]:
        """Returns the position: the epoch and how many samples of it are taken."""
        return {"epoch": self.epoch, "offset": self.offset}

    def resume(self, state: dict[str, int]) -> None:
        """Goes on from a position."""
        self.epoch, self.offset = state["epoch"], state["offset"]

    def _steps(self) -> Iterator[tuple[int, int]]:
        start = self.offset
        while start < self._size:
            stop = min(start + self.global_batch, self._size)
            if self._drop_last and stop - start < self.global_batch and start > 0:
                return
            yield start, stop
            start = stop

    def _take(self, order: torch.Tensor, first: int, last: int) -> list[int]:
        """Returns the samples [first, last); where there are none, two borrowed ones, as BatchNorm needs two."""
        taken: list[int] = order[first:last].tolist() if first < last else order[-2:].tolist()
        return taken

    def _order(self) -> torch.Tensor:
        return torch.randperm(self._size, generator=self._generator(0)) if self._shuffle else torch.arange(self._size)

    def _load(self, indices: list[list[int]]) -> DataLoader[Any]:
        return DataLoader(
            self._dataset,
            batch_sampler=indices,
            num_workers=self._num_workers,
            collate_fn=self._collate_fn,
            pin_memory=self._pin_memory,
            generator=self._generator(self._rank + 1),  # the global generator stays untouched: a resume repeats it
        )

    def _part(self, start: int, stop: int) -> tuple[int, int]:
        whole = stop - start == self.global_batch
        counts = self._shares if whole else deal(stop - start, self._shares)
        first = start + sum(counts[: self._rank])
        return first, first + counts[self._rank]

    def _generator(self, salt: int) -> torch.Generator:
        return torch.Generator().manual_seed(((self._seed * 1_000_003 + self.epoch) * 65_537 + salt) % 2**63)


def feed(dataset: Dataset[Any], plan: Plan, *, rank: int | None = None, **loading: Any) -> Feed:
    """Returns this rank's batches of `dataset`: unequal sizes as the plan says, equal numbers of steps everywhere.

    Args:
        dataset: a map-style dataset.
        plan: gives the samples that each rank takes of a global batch.
        rank: this rank; that of the open process group if left out.
        loading: `seed`, `shuffle`, `drop_last`, `num_workers`, `collate_fn`, `pin_memory`, `device` (of the batches).
    """
    own = party_of().rank if rank is None else rank
    if not 0 <= own < len(plan.roles):
        raise DataError(
            f"the batches of rank {own} were asked for, but the plan is for {len(plan.roles)} ranks, counted from 0. "
            "Make a plan for the ranks that run."
        )
    if plan.roles[own].left_out:
        raise DataError(
            f"the batches of rank {own} were asked for, but the plan leaves it out: {plan.roles[own].left_out}. "
            "Do not start that rank, or make a plan with it."
        )
    first = next((replica.ranks[0] for replica in plan.replicas if own in replica.ranks), own)  # it sees one batch
    place, shares = plan.takers.index(first), plan.batch_shares
    if not all(shares):
        raise DataError("feed was given a plan without samples per rank. Make it with a batch_size, or set them.")
    return Feed(dataset, rank=place, samples=shares, **loading)


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns a batch with its tensors on `device`, whatever lists, tuples and dicts they stand in."""
    if hasattr(batch, "to"):  # a tensor, or a batch that knows how, such as a PackedSequence
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _size_of(dataset: Dataset[Any], *, ranks: int) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"feed was given {type(dataset).__name__}, which has no length. "
            "Give a map-style dataset (__len__ and __getitem__)."
        )
    size = len(dataset)
    if size < ranks:
        raise DataError(
            f"the dataset has {size} samples for {ranks} ranks, so some rank would have none. "
            "Use fewer ranks or more data."
        )
    return size
