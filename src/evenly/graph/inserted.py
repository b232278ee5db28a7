"""Operations that tracing inserts into graphs in place of operations that change tensors or draw random numbers."""

import operator
from typing import Any

import torch
from torch import fx

IN_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.ixor: operator.xor,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
}

DRAWS_IN_PLACE = frozenset(
    {"normal_", "uniform_", "exponential_", "bernoulli_", "random_", "cauchy_", "geometric_", "log_normal_"}
)


@torch.no_grad()
def assign(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Writes `value` into a buffer, which forward changed, and returns it."""
    reason = cannot_hold(buffer, value)
    if reason:
        raise RuntimeError(f"forward sets a buffer to {reason}")
    buffer.copy_(value)
    return value


def cannot_hold(buffer: torch.Tensor | None, value: object) -> str:
    """Returns why a value cannot be written into a buffer; an empty text if it can."""
    if buffer is None or not isinstance(value, torch.Tensor):
        return "another type"
    if value.requires_grad:
        return "a tensor that requires a gradient"
    if (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
        return f"{tuple(value.shape)} {value.dtype}, but it is {tuple(buffer.shape)} {buffer.dtype}"
    return ""


def is_in_place(node: fx.Node, changed: fx.Node) -> bool:
    """Whether a node is an operator such as `+=` on `changed`."""
    return (node.target in IN_PLACE and node.args[0] is changed) or node is changed


def overwrite(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """Returns a copy of x with `value` at `index`: `x[index] = value` as a new tensor."""
    copy = x.clone()
    copy[index] = value
    return copy


def fill(x: torch.Tensor, value: Any = 0) -> torch.Tensor:
    """Returns a tensor of the shape of x with one value: `x.fill_(value)` and `x.zero_()` as a new tensor."""
    return torch.full_like(x, value)


def draw_like(x: torch.Tensor, method: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns random numbers in the shape of x, drawn by a method such as `bernoulli_`."""
    drawn: torch.Tensor = getattr(torch.empty_like(x), method)(*args, **kwargs)
    return drawn
