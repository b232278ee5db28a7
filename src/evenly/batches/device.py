"""Moves a batch to a device."""

from collections.abc import Callable

import torch


def to_device(batch: object, device: torch.device) -> object:
    """Returns a batch with its tensors on `device`, inside any lists, tuples and dicts."""
    if hasattr(batch, "to"):  # a tensor, or a batch that knows how, such as a PackedSequence
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    rebuild: Callable[..., object] = type(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return rebuild(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return rebuild(to_device(value, device) for value in batch)
    return batch
