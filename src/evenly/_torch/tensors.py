"""Tensors that become tensors of another class, and stay the same object."""

from typing import Any

import torch


def set_class(tensor: torch.Tensor, kind: Any) -> None:
    """Makes a tensor one of class `kind`, in place: who holds it, such as an optimizer, holds the same object.

    torch allows it between subclasses of torch.Tensor with the same layout, and does it itself with lazy parameters
    (torch.nn.parameter.UninitializedParameter.materialize). It is undone by the same call with the class from before.
    """
    tensor.__class__ = kind
