"""Counts the samples of a batch from the arguments of `forward`."""

import math
from collections.abc import Callable, Mapping, Sequence

from evenly._torch.tensors import samples_in
from evenly.errors import SpecError

LEAST, MOST = 1e-6, 1e12  # samples of a batch, so that products with gradients stay precise


def counted_samples(count: Callable[..., float], args: Sequence[object], kwargs: Mapping[str, object]) -> float:
    """Returns the samples of a batch by `count`; raises `SpecError` if it returns no valid number."""
    counted = count(*args, **kwargs)
    try:
        samples = float(counted)
    except (TypeError, ValueError, RuntimeError):
        samples = math.nan
    if samples != 0 and not LEAST <= samples <= MOST:
        raise SpecError(
            f"count= gave {counted!r} for a batch. It must return its samples: 0, or a number from {LEAST:g} to "
            f"{MOST:g}, since gradients are multiplied by it."
        )
    return samples


def leading_dim(*args: object, **kwargs: object) -> float:
    """Returns the leading dim of the first tensor in the arguments, also inside dicts and lists: a batch's samples."""
    samples = samples_in((*args, *kwargs.values()))
    if samples is not None:
        return float(samples)
    raise SpecError(
        "the samples of a batch are counted by the leading dim of the first tensor given to forward; none was given. "
        "Pass count=, a function of forward's arguments that returns the number of samples."
    )
