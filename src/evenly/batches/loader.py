"""Dataset + Plan -> this rank's batches: one global order, every sample once, equal numbers of steps on all ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from typing import Any, Unpack

import torch
from torch.utils.data import Dataset

from evenly.batches.counting import samples_of_call
from evenly.batches.data_loaders import Samples, without_loader
from evenly.batches.device import to_device
from evenly.batches.loading import FeedOptions, LoaderOptions
from evenly.batches.parts import Epoch, Rules, check_samples
from evenly.batches.sources import open_source
from evenly.comm import rank_group_of
from evenly.errors import DataError, SpecError
from evenly.spec import Plan


class Feed:
    """An iterable over this rank's part of every global batch.

    Each epoch has one order of all samples, the same on every rank. Step by step each rank takes its samples of the
    next global batch; a last, smaller batch is split in the same proportions. `samples` is the real size of the batch
    yielded last: 0 if nothing was left for this rank and it got a borrowed batch, to take part in the step.
    """

    def __init__(
        self,
        dataset: Dataset[object] | Iterable[object],
        *,
        rank: int,
        samples: Sequence[int],
        seed: int = 0,
        shuffle: bool | None = None,
        sampler: Iterable[object] | None = None,
        drop_last: bool = False,
        device: torch.device | None = None,
        **loading: Unpack[LoaderOptions],
    ) -> None:
        self.epoch = 0
        self.offset = 0  # samples of this epoch that all ranks together have taken
        self.samples = 0
        self._is_under_way = False  # an epoch has begun and not ended
        self._current: Epoch | None = None
        self.between: list[Callable[[], None]] = []  # called when a step is over and another follows
        self.on_end: list[Callable[[], None]] = []
        self.ends_early = False  # set between two steps: the epoch yields no further batch
        self._device = device
        self._drop_last = drop_last
        self._name = type(dataset).__name__
        self._shares, self._rank = check_samples(samples), rank
        if not 0 <= rank < len(self._shares):
            raise DataError(
                f"the batches of rank {rank} were asked for, but the plan is for {len(self._shares)} ranks, counted "
                "from 0. Make a plan for the ranks that run."
            )
        try:
            number = index(seed)
        except TypeError:
            raise DataError(f"seed={seed!r} was given for the order of samples. Give a whole number.") from None
        rules = Rules(rank=rank, ranks=len(self._shares), seed=number, drop_last=drop_last, loading=loading)
        self._source = open_source(dataset, rules, shuffle=shuffle, sampler=sampler)

    @property
    def global_batch(self) -> int:
        """The samples of all ranks in one step."""
        return sum(self._shares)

    @property
    def times(self) -> float:
        """The samples of all ranks over those of this rank; the number of ranks if it has none."""
        rank_samples = self._shares[self._rank]
        return self.global_batch / rank_samples if rank_samples else len(self._shares)

    @property
    def is_at_end(self) -> bool:
        """Whether the batch yielded last is the last one of its epoch."""
        return self._is_under_way and self._current is not None and not self._has_next(self._current)

    def __len__(self) -> int:
        """Returns the number of steps in an epoch, equal on all ranks; `TypeError` for a stream without a length."""
        whole, remainder = divmod(self._source.size(), self.global_batch)
        return whole + (remainder > 0 and not (self._drop_last and whole))

    def __iter__(self) -> Iterator[Any]:
        epoch = self._current = self._source.begin(self.epoch)
        while self._has_next(epoch):
            self.offset, self.samples, batch = epoch.take()
            self._is_under_way = True
            yield batch if self._device is None else to_device(batch, self._device)
            for tell in self.between if self._has_next(epoch) else ():
                tell()
            if self.ends_early:
                self._is_under_way = False
                return
        self._is_under_way = False
        if self.offset == 0:
            raise DataError(
                f"epoch {self.epoch} of {self._name} was requested, but it has no samples. Give an iterable whose "
                "__iter__ starts anew."
            )
        self.offset = 0
        self.epoch += 1
        for tell in self.on_end:
            tell()

    def samples_of(self, module: torch.nn.Module, *args: object, **kwargs: object) -> float:
        """Returns the samples of the batch yielded last, which `module` is about to be called with.

        Raises `SpecError` if none was yielded in this epoch and the module trains. In evaluation it is the
        leading dim of the first tensor.
        """
        return samples_of_call(self.samples if self._is_under_way else None, module, *args, **kwargs)

    def state(self) -> dict[str, int]:
        """Returns the position: the epoch and how many samples of it are taken."""
        return {"epoch": self.epoch, "offset": self.offset}

    def resume(self, state: dict[str, int]) -> None:
        """Resumes from a position."""
        numbers = [state.get(name) for name in ("epoch", "offset")] if isinstance(state, dict) else []
        if not numbers or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise SpecError(
                f"the feed of {self._name} was given the position {state}. Give what state() has returned: an epoch "
                "and an offset, both whole numbers of at least 0."
            )
        epoch, offset = state["epoch"], state["offset"]
        try:
            size = self._source.size()
        except TypeError:  # a stream without a length
            size = offset
        if offset > size:
            raise DataError(
                f"the feed of {self._name} was given a position after {offset} samples of an epoch, but an epoch has "
                f"{size}. Give the data that the position was saved with."
            )
        self.epoch, self.offset = epoch, offset

    def reshare(self, samples: Sequence[int]) -> None:
        """Changes the samples of each rank from the next batch on; no sample is lost or repeated.

        All ranks call it at the same step with the same numbers. The sum may change too. Batches that workers
        prefetched are dropped and loaded again, unless the numbers are the same.

        Args:
            samples: one number for each rank that takes a batch of its own, as in the plan.
        """
        shares = check_samples(samples, ranks=len(self._shares))
        if shares != self._shares:
            self._shares = shares

    def _has_next(self, epoch: Epoch) -> bool:
        if epoch.shares is not self._shares:
            epoch.load(self.offset, self._shares)
        return epoch.more()


def feed(
    dataset: Dataset[object] | Iterable[object],
    plan: Plan,
    *,
    rank: int | None = None,
    device: torch.device | None = None,
    **loading: Unpack[FeedOptions],
) -> Feed:
    """Returns this rank's batches of `dataset`: unequal sizes as the plan says, equal numbers of steps everywhere.

    Args:
        dataset: a map-style dataset, or a stream: an `IterableDataset`, or anything else that can be iterated over. Of
            a stream every rank reads all samples, in the same order, and takes its part. Or a `DataLoader`: its
            dataset, order, `collate_fn` and workers are taken, its batch size is not.
        plan: gives the samples that each rank takes of a global batch.
        rank: this rank; that of the open process group if left out.
        device: where batches are moved to; they stay where they are if left out.
        loading: `seed`, `shuffle` (yes, unless there is a `sampler` or a stream), `sampler`, `drop_last`, and of
            torch's DataLoader `num_workers`, `collate_fn`, `pin_memory`, `worker_init_fn`, `persistent_workers`,
            `prefetch_factor`, `timeout`, `multiprocessing_context`.
    """
    own_rank = rank_group_of().rank if rank is None else rank
    if not 0 <= own_rank < len(plan.roles):
        raise DataError(
            f"the batches of rank {own_rank} were asked for, but the plan is for {len(plan.roles)} ranks, counted "
            "from 0. Make a plan for the ranks that run."
        )
    if reason := plan.roles[own_rank].left_out:
        raise DataError(
            f"the batches of rank {own_rank} were asked for, but the plan leaves it out: {reason}. "
            "Do not start that rank, or make a plan with it."
        )
    replica = plan.replica_of(own_rank)
    taker = own_rank if replica is None else replica.ranks[0]  # a replica takes one batch
    return open_feed(dataset, plan, taker=plan.takers.index(taker), device=device, **loading)


def open_feed(
    dataset: Samples, plan: Plan, *, taker: int, device: torch.device | None = None, **loading: Unpack[FeedOptions]
) -> Feed:
    """Returns the batches of a rank or network, given by its place among those that take batches."""
    shares = plan.batch_shares
    if not all(shares):
        raise DataError("feed was given a plan without samples per rank. Make it with a batch_size, or set them.")
    if isinstance(dataset, Feed):
        raise DataError(
            "a loader that feed has made was given as dataset, but it yields whole batches. Give the dataset itself."
        )
    samples, options = without_loader(dataset, loading)
    return Feed(samples, rank=taker, samples=shares, device=device, **options)


def steps_per_epoch(dataset: Samples, plan: Plan, *, accumulate: int = 1, **loading: Unpack[FeedOptions]) -> int:
    """Returns the optimizer steps of an epoch, equal on all ranks; each uses `accumulate` batches, the last one fewer.

    Raises:
        DataError: for a stream without a length.
    """
    if accumulate < 1:
        raise SpecError(f"accumulate={accumulate} was asked for, but a step uses at least 1 batch. Give 1 or more.")
    try:
        batches = len(open_feed(dataset, plan, taker=0, **loading))
    except TypeError:
        raise DataError(
            f"the steps of an epoch were asked for, but {type(dataset).__name__} has no length. Give it a __len__, or "
            "count the steps yourself."
        ) from None
    return -(-batches // accumulate)
