"""Looks at many tensors at once, by operations that torch's optimizers and gradient scalers use.

They have no public names; torch 2.11 and 2.13 have them.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch


class FinitenessOnHost:
    """Looks whether all elements of tensors in host memory are finite; their values stay as they are.

    The operation is that of `GradScaler.unscale_`: one call for all tensors, which multiplies them by a scale, here 1.
    """

    def __init__(self) -> None:
        self._found = torch.zeros((), dtype=torch.float32, device="cpu")  # 1 where one was not finite
        self._one = torch.ones((), dtype=torch.float32, device="cpu")

    def __call__(self, tensors: list[torch.Tensor]) -> bool:
        """Returns whether all elements are finite."""
        try:
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, self._found, self._one)
        except (RuntimeError, TypeError):  # complex or sparse ones
            self._found.zero_()  # it may have looked at some before
            numbers = [_stored_numbers(tensor) for tensor in tensors]
            return all(bool(torch.isfinite(tensor).all()) for tensor in numbers)
        if not self._found.item():
            return True
        self._found.zero_()
        return False


def largest_magnitude(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the largest absolute value in these tensors, on the device of the first; NaN if there is one."""
    groups: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in map(_stored_numbers, tensors):
        if tensor.numel():
            groups[tensor.device, tensor.dtype].append(tensor)
    largest = [torch.stack(torch._foreach_norm(group, float("inf"))).max() for group in groups.values()]
    if len(largest) == 1:
        return largest[0]
    device = tensors[0].device
    dtype = torch.float64 if any(value.dtype == torch.float64 for value in largest) else torch.float32
    zero = torch.zeros((), dtype=dtype, device=device)
    return torch.stack([zero, *(value.to(device, dtype) for value in largest)]).max()


def _stored_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the real numbers that a tensor consists of."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
