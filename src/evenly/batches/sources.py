"""Dataset + options -> where steps come from: samples picked by index, or a stream."""

from collections.abc import Iterable, Sized
from typing import TypeGuard

from torch.utils.data import DataLoader, Dataset, IterableDataset

from evenly.batches.indexed import IndexedSource
from evenly.batches.loading import check_loading
from evenly.batches.order import Ordering
from evenly.batches.parts import Rules, Source
from evenly.batches.streams import Stream
from evenly.errors import DataError, SpecError


def open_source(dataset: object, rules: Rules, *, shuffle: bool | None, sampler: Iterable[object] | None) -> Source:
    """Returns what gives one rank its steps."""
    check_loading(rules.loading)
    _refuse_loader(dataset)
    if _has_indices(dataset, sampler):
        ordering = Ordering(dataset, ranks=rules.ranks, seed=rules.seed, shuffle=shuffle, sampler=sampler)
        return IndexedSource(dataset, ordering, rules)
    return Stream(_checked_stream(dataset, shuffle=shuffle, sampler=sampler), rules)


def _refuse_loader(dataset: object) -> None:
    """Raises `DataError` for a DataLoader: batches are made here, as large as the plan says."""
    if isinstance(dataset, DataLoader):
        raise DataError(
            "a DataLoader was given, but feed takes a dataset and makes batches itself. Give loader.dataset, and "
            "shuffle=, num_workers= and collate_fn= beside it."
        )


def _has_indices(dataset: object, sampler: object) -> TypeGuard[Dataset[object]]:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return False
    return isinstance(dataset, Sized) or (sampler is not None and not isinstance(dataset, Iterable))


def _checked_stream(dataset: object, *, shuffle: bool | None, sampler: object) -> Iterable[object]:
    """Returns the stream, or raises an error for what cannot be read as one."""
    name = type(dataset).__name__
    if not isinstance(dataset, Iterable):
        raise DataError(
            f"feed was given {name}, which has neither a length nor an order. "
            "Give a map-style dataset (__len__ and __getitem__), or a stream (__iter__)."
        )
    if sampler is not None:
        raise SpecError(
            f"sampler={type(sampler).__name__} was given for {name}, but a stream has no indices to draw. "
            "Leave it out, or give a map-style dataset (__len__ and __getitem__)."
        )
    if shuffle:
        raise SpecError(
            f"shuffle=True was given for {name}, but a stream comes in its own order. "
            "Leave it out, and let the stream shuffle if it can."
        )
    return dataset
