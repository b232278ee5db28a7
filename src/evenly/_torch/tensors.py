"""Changes the class of a tensor in place."""

import torch


def set_class(tensor: torch.Tensor, kind: type[torch.Tensor]) -> None:
    """Sets the class of a tensor to `kind`, in place: an optimizer that refers to it keeps the same object.

    torch allows it between subclasses of torch.Tensor with the same layout, and does it itself with lazy parameters
    (torch.nn.parameter.UninitializedParameter.materialize). A call with the previous class undoes it.
    """
    tensor.__class__ = kind
