"""Dropout whose mask does not depend on the cut: it is a function of the position in the full tensor."""

from collections.abc import Sequence

import torch

from evenly.spec.layout import Segments

_FIRST, _SECOND = -4658895280553007687, -7723592293110705685  # odd constants of a 64-bit finalizer
_MASK34, _MASK37, _MASK31 = (1 << 34) - 1, (1 << 37) - 1, (1 << 31) - 1


class DropoutStream:
    """The seed of a network's dropout and the number of its forward passes so far."""

    def __init__(self, seed: int) -> None:
        self.seed, self.passes = seed, 0

    def key(self, layer: int) -> int:
        """Returns the number that this pass and layer add to every position."""
        return (self.seed * 1_000_003 + self.passes) * 65_537 + layer


def drop(
    x: torch.Tensor,
    p: float,
    key: int,
    *,
    dim: int = 0,
    segments: Segments | None = None,
    full: int = 0,
    shared: Sequence[int] = (),
) -> torch.Tensor:
    """Returns x with elements zeroed with probability p and the others scaled by 1 / (1 - p).

    Args:
        x: this rank's part: the indices `segments` of `dim`, which has `full` indices; all of it without segments.
        p: probability of an element to be zero.
        key: a number that differs between layers and steps.
        dim: the dim that is cut.
        segments: the indices of `dim` that x holds.
        full: the size of `dim` in the full tensor.
        shared: dims along which all elements share one draw.
    """
    if p == 0.0 or not x.numel():
        return x
    if p == 1.0:
        return x * 0.0
    position = torch.zeros((), dtype=torch.int64, device=x.device)
    stride = 1
    for d in reversed(range(x.ndim)):
        size = full if segments is not None and d == dim else x.shape[d]
        if d in shared:
            continue
        coordinate = torch.arange(x.shape[d], device=x.device)
        if segments is not None and d == dim:
            coordinate = torch.cat([torch.arange(a, b, device=x.device) for a, b in segments])
        position = position + (coordinate * stride).view(-1, *[1] * (x.ndim - 1 - d))
        stride *= size
    keep = _bits(position, key) >= int(p * (1 << 31))
    return x * keep.to(x.dtype) / (1.0 - p)


def _bits(position: torch.Tensor, key: int) -> torch.Tensor:
    """Returns 31 random bits for every position; integer arithmetic, so all devices agree."""
    signed = (key + (1 << 63)) % (1 << 64) - (1 << 63)
    z = position * 2654435769 + signed
    z = (z ^ ((z >> 30) & _MASK34)) * _FIRST
    z = (z ^ ((z >> 27) & _MASK37)) * _SECOND
    return (z >> 32) & _MASK31
