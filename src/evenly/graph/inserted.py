"""Operations that tracing inserts into graphs in place of operations that change tensors or draw random numbers."""

from typing import Any

import torch

DRAWS_IN_PLACE = frozenset(
    {"normal_", "uniform_", "exponential_", "bernoulli_", "random_", "cauchy_", "geometric_", "log_normal_"}
)


@torch.no_grad()
def assign(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Writes `value` into a buffer, which forward changed in place, and returns it."""
    buffer.copy_(value)
    return value


def overwrite(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """Returns a copy of x with `value` at `index`: `x[index] = value` as a new tensor."""
    copy = x.clone()
    copy[index] = value
    return copy


def draw_like(x: torch.Tensor, method: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns random numbers in the shape of x, drawn by a method such as `bernoulli_`."""
    drawn: torch.Tensor = getattr(torch.empty_like(x), method)(*args, **kwargs)
    return drawn
