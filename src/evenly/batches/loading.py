"""What is passed on to torch's DataLoader."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from evenly._errors import SpecError

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


def check_loading(loading: Mapping[str, Any]) -> None:
    """Raises `SpecError` for an option that is not passed on, or that a DataLoader does not take."""
    for name in loading:
        if name not in PASSED_ON:
            known = ", ".join(("seed", "shuffle", "sampler", "drop_last", "device", *PASSED_ON))
            raise SpecError(
                f"{name}= was given, but feed takes no such option. "
                f"{INSTEAD.get(name, f'Leave it out; there are: {known}.')}"
            )
    try:
        DataLoader([], **loading)  # type: ignore[arg-type]  # an empty list has no type of samples
    except (TypeError, ValueError) as problem:
        given = ", ".join(f"{name}={value!r}" for name, value in loading.items())
        raise SpecError(f"{given} was given, but torch's DataLoader refuses it: {problem} Change it.") from problem
