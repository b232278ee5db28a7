"""Changes the class of a tensor in place, and finds the samples of a batch in nested arguments."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass

import torch
from torch.nn.utils.rnn import PackedSequence


def set_class(tensor: torch.Tensor, kind: type[torch.Tensor]) -> None:
    """Sets the class of a tensor to `kind`, in place: an optimizer that refers to it keeps the same object.

    torch allows it between subclasses of torch.Tensor with the same layout, and does it itself with lazy parameters
    (torch.nn.parameter.UninitializedParameter.materialize). A call with the previous class undoes it.
    """
    tensor.__class__ = kind


def samples_in(values: Iterable[object]) -> int | None:
    """Returns the leading dim of the first tensor in `values`, inside any mappings, lists, tuples and dataclasses.

    A `PackedSequence` counts its sequences. None if there is no tensor; a tensor without dims is passed over.

    >>> samples_in([0.5, torch.tensor(1.0), {"mask": None, "ids": [torch.zeros(3, 7)]}])
    3
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            samples = value.shape[0] if value.ndim else None
        elif isinstance(value, PackedSequence):
            samples = int(value.batch_sizes[0])
        else:
            samples = samples_in(_items(value))
        if samples is not None:
            return samples
    return None


def _items(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return ()
