"""A DataLoader -> its dataset and the options that `feed` takes; batches are made anew, as large as the plan says."""

from collections.abc import Iterable, Sized

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from evenly.batches.loading import FeedOptions
from evenly.errors import DataError

ORDERS = ("shuffle", "sampler")  # either replaces the order of a loader

Samples = Dataset[object] | Iterable[object]  # a map-style dataset, a stream, or a DataLoader of one


def without_loader(dataset: Samples, options: FeedOptions) -> tuple[Samples, FeedOptions]:
    """Returns a dataset and options; those of a `DataLoader` if one was given, changed by `options`.

    Raises:
        DataError: where batches cannot be made of the same samples in the same order: a batch sampler or `__iter__` of
            its own, a dataset that yields whole batches, a generator, a stream of which workers or ranks read parts.
    """
    if not isinstance(dataset, DataLoader):
        return dataset, options
    _require_plain(dataset)
    given: FeedOptions = {
        "num_workers": dataset.num_workers,
        "collate_fn": dataset.collate_fn,
        "pin_memory": dataset.pin_memory,
        "worker_init_fn": dataset.worker_init_fn,
    }
    if options.get("num_workers") != 0:  # without workers torch refuses these
        given["timeout"] = dataset.timeout
        given["multiprocessing_context"] = dataset.multiprocessing_context
        given["prefetch_factor"] = dataset.prefetch_factor
        given["persistent_workers"] = dataset.persistent_workers
    if not isinstance(dataset.dataset, IterableDataset):
        batch_sampler = dataset.batch_sampler
        given["drop_last"] = batch_sampler.drop_last if isinstance(batch_sampler, BatchSampler) else dataset.drop_last
        if not any(name in options for name in ORDERS):
            sampler = batch_sampler.sampler if isinstance(batch_sampler, BatchSampler) else dataset.sampler
            given.update(_order_of(sampler, dataset))
    else:
        given["drop_last"] = dataset.drop_last
    return dataset.dataset, {**given, **options}


def _order_of(sampler: object, loader: DataLoader[object]) -> FeedOptions:
    """Returns the options that give the order of a sampler."""
    size = len(loader.dataset) if isinstance(loader.dataset, Sized) else None
    if type(sampler) is SequentialSampler and len(sampler) == size:
        return {"shuffle": False}
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size:
        return {"shuffle": True}
    return {"sampler": sampler}  # type: ignore[typeddict-item]  # checked where it is used


def _require_plain(loader: DataLoader[object]) -> None:
    """Raises `DataError` for a loader whose samples or order cannot be had otherwise."""
    name = type(loader).__name__
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise DataError(
            f"a {name} was given, which makes batches in an __iter__ of its own. Give its dataset, and collate_fn=, "
            "sampler= and num_workers= beside it."
        )
    if loader.batch_sampler is None:
        raise DataError(
            "a DataLoader with batch_size=None was given, so its dataset yields whole batches, and the plan cannot say "
            "how large they are. Give a dataset of single samples, and collate_fn= where they are put together."
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise DataError(
            f"a DataLoader with batch_sampler={type(loader.batch_sampler).__name__} was given, which decides which "
            "samples form a batch, but the plan says how large batches are. Give loader.dataset, and the order of "
            "single samples as sampler=."
        )
    if loader.generator is not None:
        raise DataError(
            "a DataLoader with generator= was given, but the order is made from a seed, so that all ranks agree. "
            "Make the loader without it, and give Session(seed=...) or seed=."
        )
    if isinstance(loader.dataset, IterableDataset):
        _require_whole_stream(loader)


def _require_whole_stream(loader: DataLoader[object]) -> None:
    """Raises `DataError` for a stream of which each worker or rank reads a part: every rank must read all of it."""
    stream = loader.dataset
    name = type(stream).__name__
    if loader.num_workers and loader.worker_init_fn is not None:
        raise DataError(
            f"a DataLoader of the stream {name} was given with worker_init_fn=, which may give each worker a part of "
            "it, but here every worker reads all of it. Give loader.dataset, which yields all samples, with "
            "num_workers= beside it."
        )
    if hasattr(stream, "rank") and (hasattr(stream, "world_size") or hasattr(stream, "num_replicas")):
        raise DataError(
            f"a DataLoader of the stream {name} was given, which has a rank and yields a part of the samples, but "
            "every rank must read all of them. Give a stream that is not split over ranks."
        )
