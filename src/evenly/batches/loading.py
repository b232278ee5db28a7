"""Options that are passed on to torch's DataLoader."""

from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import Any, TypedDict

from torch.utils.data import DataLoader

from evenly.errors import SpecError

Collate = Callable[[Any], object]  # samples, as the dataset has them -> a batch


class LoaderOptions(TypedDict, total=False):
    """Options of torch's DataLoader."""

    num_workers: int
    collate_fn: Collate | None
    pin_memory: bool
    worker_init_fn: Callable[[int], None] | None
    persistent_workers: bool
    prefetch_factor: int | None
    timeout: float
    multiprocessing_context: BaseContext | str | None


class FeedOptions(LoaderOptions, total=False):
    """How `feed` orders and loads samples."""

    seed: int
    shuffle: bool | None
    sampler: Iterable[object] | None
    drop_last: bool


PASSED_ON = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "worker_init_fn",
    "persistent_workers",
    "prefetch_factor",
    "timeout",
    "multiprocessing_context",
)
INSTEAD = {
    "batch_size": "The plan says how many samples each rank takes: set them there.",
    "batch_sampler": "The plan says how large batches are: give the order of single samples as sampler=.",
    "generator": "The order is made from a seed, so that all ranks agree: give seed=.",
}


def check_loading(loading: LoaderOptions) -> None:
    """Raises `SpecError` for an option that is not passed on, or that a DataLoader does not take."""
    for name in loading:
        if name not in PASSED_ON:
            allowed = ", ".join(("seed", "shuffle", "sampler", "drop_last", "device", *PASSED_ON))
            raise SpecError(
                f"{name}= was given, but feed takes no such option. "
                f"{INSTEAD.get(name, f'Leave it out; there are: {allowed}.')}"
            )
    try:
        DataLoader([], **loading)  # type: ignore[arg-type]  # an empty list has no type of samples
    except (TypeError, ValueError) as problem:
        settings = ", ".join(f"{name}={value!r}" for name, value in loading.items())
        raise SpecError(f"{settings} was given, but torch's DataLoader refuses it: {problem} Change it.") from problem
