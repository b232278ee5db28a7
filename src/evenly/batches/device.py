"""Moves a batch to a device."""

from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns a batch with its tensors on `device`, inside any lists, tuples and dicts."""
    if hasattr(batch, "to"):  # a tensor, or a batch that knows how, such as a PackedSequence
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
