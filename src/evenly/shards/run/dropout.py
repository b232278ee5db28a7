"""Random numbers that do not depend on the cut: functions of the step, the layer and the position in a full tensor."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from evenly._torch import pytree
from evenly.spec.layout import Segments

RANDOM_OPS = ("dropout", "attention", "draw", "random")  # operations that use the stream
_SEEDING = threading.Lock()  # ranks may be threads, which share torch's generator
_FULL: dict[str, Callable[..., Any]] = {
    "rand_like": torch.rand,
    "randn_like": torch.randn,
    "randint_like": torch.randint,
}

_FIRST, _SECOND = -4658895280553007687, -7723592293110705685  # odd constants of a 64-bit finalizer
_MASK34, _MASK37, _MASK31 = (1 << 34) - 1, (1 << 37) - 1, (1 << 31) - 1


class DropoutStream:
    """The seed of a network's dropout and the number of its forward passes so far."""

    def __init__(self, seed: int) -> None:
        self.seed, self.passes = seed, 0

    def key(self, layer: int) -> int:
        """Returns the number that this pass and layer add to every position."""
        return (self.seed * 1_000_003 + self.passes) * 65_537 + layer


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seeds torch's generator of the CPU inside the block, and restores it after it."""
    with _SEEDING:
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(key % (1 << 63))
        try:
            yield
        finally:
            torch.set_rng_state(state)


def draw(
    name: str, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], key: int
) -> torch.Tensor:
    """Returns the random numbers of one operation of torch, the same on every rank and device.

    They are drawn on the CPU: the generators of different devices give different numbers.

    Args:
        name: the operation: `rand`, `bernoulli`, `draw_like` (a method such as `bernoulli_`), ...
        target: the function that draws.
        args: its arguments, full tensors.
        kwargs: its arguments by name.
        key: a number that differs between layers and steps.
    """
    options = {
        key: value for key, value in kwargs.items() if key not in ("device", "layout", "pin_memory", "generator")
    }
    tensors = [x for x in pytree.tree_leaves((list(args), options)) if isinstance(x, torch.Tensor)]
    device = kwargs.get("device") or (tensors[0].device if tensors else torch.get_default_device())
    args, options = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), (list(args), options))
    requires_grad = bool(options.pop("requires_grad", False))
    if name in _FULL:
        x, *bounds = args
        options = {"dtype": x.dtype, **{k: v for k, v in options.items() if v is not None and k != "memory_format"}}
        target, args = _FULL[name], [*bounds, x.shape]
    generator = torch.Generator().manual_seed(key % (1 << 63))
    drawn: torch.Tensor = target(*args, **options, generator=generator)
    return drawn.to(device).requires_grad_(requires_grad)


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
