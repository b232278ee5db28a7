"""Maps numbers of any dtype to integers in the same order, so that one collective finds all maxima."""

from collections.abc import Sequence

import torch

from evenly.exchange.tensors.flat import real

_LEAST, _MOST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def to_ordered(tensor: torch.Tensor, *, smallest: bool = False) -> torch.Tensor:
    """Returns int64 keys in the order of the elements, with `smallest` in the reverse one; NaN comes last.

    Complex numbers are pairs; their keys are unique and invertible, but their order has no meaning.

    >>> to_ordered(torch.tensor([2.0, -1.0, float("-inf")])).argsort().tolist()
    [2, 1, 0]
    """
    plain = real(tensor)
    if plain.is_floating_point():
        wide, nan = plain.double(), -torch.nan if smallest else torch.nan
        bits = torch.where(wide.isnan(), nan, wide).view(torch.int64)
        keys = torch.where(bits < 0, bits ^ _MOST, bits)  # of two negative floats the larger has the smaller bits
    elif plain.dtype == torch.uint64:
        keys = plain.view(torch.int64) ^ _LEAST
    else:
        keys = plain.to(torch.int64, copy=True)
    return ~keys if smallest else keys


def from_ordered(keys: torch.Tensor, like: torch.Tensor, *, smallest: bool = False) -> torch.Tensor:
    """Returns the elements of these keys in the dtype of `like`."""
    keys = ~keys if smallest else keys
    if like.is_floating_point() or like.is_complex():
        values = torch.where(keys < 0, keys ^ _MOST, keys).view(torch.float64)
        return torch.view_as_complex(values).to(like.dtype) if like.is_complex() else values.to(like.dtype)
    return (keys ^ _LEAST).view(torch.uint64) if like.dtype == torch.uint64 else keys.to(like.dtype)


def below_all(keys: torch.Tensor) -> torch.Tensor:
    """Returns keys smaller than those of any element: a rank that does not take part sends them."""
    return torch.full_like(keys, _LEAST)


def extreme(values: Sequence[torch.Tensor], *, smallest: bool = False) -> torch.Tensor:
    """Returns the largest of each element over tensors of one shape, or the smallest; NaN where any is NaN.

    >>> extreme([torch.tensor([1.0, 4.0]), torch.tensor([2.0, 3.0])])
    tensor([2., 4.])
    """
    keys = torch.stack([to_ordered(value, smallest=smallest) for value in values]).amax(0)
    return from_ordered(keys, values[0], smallest=smallest)
