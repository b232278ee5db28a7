"""A global batch -> the part of one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Protocol

from evenly.batches.loading import LoaderOptions
from evenly.batches.ranges import Ranges
from evenly.errors import SpecError
from evenly.spec import deal

Step = tuple[int, int, object]  # samples of the epoch taken after it, samples of this rank, its batch


@dataclass(frozen=True)
class Rules:
    """The settings of one rank's loader."""

    rank: int
    ranks: int
    seed: int
    drop_last: bool
    loading: LoaderOptions  # what is passed on to torch's DataLoader

    @property
    def workers_last(self) -> bool:
        """Whether workers outlive an epoch."""
        return bool(self.loading.get("persistent_workers"))


class Epoch(Protocol):
    """An epoch that is being read: the steps of one rank, one after the other."""

    shares: tuple[int, ...] | None  # those it is loaded with

    def load(self, offset: int, shares: tuple[int, ...]) -> None:
        """Continues after `offset` samples with these shares; prefetched batches are dropped."""

    def more(self) -> bool:
        """Returns whether a step follows; the global random numbers are left alone."""

    def take(self) -> Step:
        """Returns the step that follows."""


class Source(Protocol):
    """Where epochs come from."""

    def size(self) -> int:
        """Returns the samples of an epoch, or raises `TypeError` where they are not known."""

    def begin(self, epoch: int) -> Epoch:
        """Returns an epoch, to be loaded from any offset."""

    def epoch_size(self, epoch: int) -> int | None:
        """Returns the samples of an epoch; None where they are not known."""

    def begin_part(self, epoch: int, ranges: Ranges) -> Epoch:
        """Returns these positions of an epoch as if they were all of it; ranges that follow begin later, if possible.

        Raises `DataError` if the samples are gone: a stream that can be read once only is further already.
        """


def check_samples(samples: Sequence[int], *, ranks: int | None = None) -> tuple[int, ...]:
    """Returns the samples of each rank, or raises `SpecError`."""
    try:
        numbers = tuple(index(number) for number in samples)
    except TypeError:
        numbers = ()
    if not numbers or min(numbers) < 1 or ranks not in (None, len(numbers)):
        takers = "rank" if ranks is None else f"of the {ranks} ranks that take a batch"
        raise SpecError(
            f"samples={samples!r} was given, but each {takers} needs a whole number of at least 1. "
            "Give a list of such numbers."
        )
    return numbers


def is_step(count: int, batch_size: int, *, start: int, drop_last: bool) -> bool:
    """Returns whether `count` samples make a step; `drop_last` drops a smaller batch, unless it is the only one."""
    return count == batch_size or (count > 0 and not (drop_last and start > 0))


def part_of(count: int, shares: Sequence[int], rank: int) -> tuple[int, int]:
    """Returns which samples of a global batch of `count` are those of `rank`; a smaller one is split in proportion.

    >>> part_of(10, [7, 3], 1), part_of(5, [7, 3], 1), part_of(1, [7, 3], 1)
    ((7, 10), (4, 5), (1, 1))
    """
    counts = shares if count == sum(shares) else deal(count, shares)
    start = sum(counts[:rank])
    return start, start + counts[rank]
