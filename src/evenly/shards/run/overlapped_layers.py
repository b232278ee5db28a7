"""Layers that take their input from other ranks: its gradient travels while that of the weight is computed.

The input is copied or gathered on the way in. In backward the input's gradient comes first, its sum over ranks is
started, and the gradient of the weight is computed meanwhile.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from evenly.comm import Redistribute

CONV = ("stride", "padding", "dilation", "groups")
CONV_TRANSPOSE = ("stride", "padding", "output_padding", "groups", "dilation")


def mixed(
    shift: Redistribute,
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Returns the layer `name` (conv2d, linear, ...) of the moved input, differentiable."""
    x, weight, bias = lowered(x), lowered(weight), bias if bias is None else lowered(bias)
    y: torch.Tensor = _Mixed.apply(x, weight, bias, shift, name, options)  # type: ignore[no-untyped-call]  # torch has no annotation here
    return y


def lowered(x: torch.Tensor) -> torch.Tensor:
    """Returns x in the type of autocast, if that is on: devices disagree about many results' types, wires cannot."""
    if not torch.is_autocast_enabled(x.device.type) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def layer_options(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the settings of a layer as they stand after input, weight and bias; None where they are not plain."""
    if name == "linear":
        return {}
    names = CONV_TRANSPOSE if "transpose" in name else CONV
    options = dict(zip(names, args, strict=False)) | {key: kwargs[key] for key in names if key in kwargs}
    return None if isinstance(options.get("padding"), str) else options


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shift: Redistribute,
        name: str,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        entered = shift.forward(x).wait()
        # A frozen weight needs no input in backward but its shape.
        kept = entered if ctx.needs_input_grad[1] else entered.new_empty(1).expand(entered.shape)
        ctx.save_for_backward(kept, weight)
        ctx.shift = shift
        ctx.name = name
        ctx.options = options
        ctx.has_bias = bias is not None
        with torch.autocast(x.device.type, enabled=False):
            run: Callable[..., torch.Tensor] = getattr(F, name)
            return run(entered, weight, bias, **options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        with ctx.shift.shard_group.telling():
            return _Mixed._back(ctx, gradient)

    @staticmethod
    def _back(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        for_input, for_weight, for_bias = ctx.needs_input_grad[:3]
        gradients = _linear if ctx.name == "linear" else _conv
        travelling = None
        if for_input:
            travelling = ctx.shift.backward(gradients(ctx, gradient, x, weight, (True, False, False))[0])
        _, weight_gradient, bias_gradient = gradients(ctx, gradient, x, weight, (False, for_weight, for_bias))
        return None if travelling is None else travelling.wait(), weight_gradient, bias_gradient, None, None, None


Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _linear(
    ctx: Any, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: tuple[bool, bool, bool]
) -> Gradients:
    rows, inputs = (t.flatten(0, -2) if t.ndim > 1 else t[None] for t in (gradient, x))
    return (
        gradient @ weight if wanted[0] else None,
        rows.T @ inputs if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


def _conv(
    ctx: Any, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: tuple[bool, bool, bool]
) -> Gradients:
    if not any(wanted):
        return None, None, None
    dims, options = x.ndim - 2, ctx.options

    def each(key: str, default: int) -> list[int]:
        value = options.get(key, default)
        return list(value) if isinstance(value, tuple | list) and len(value) == dims else [_single(value)] * dims

    found: Gradients = torch.ops.aten.convolution_backward(
        gradient,
        x,
        weight,
        [gradient.shape[1]] if ctx.has_bias else None,
        each("stride", 1),
        each("padding", 0),
        each("dilation", 1),
        "transpose" in ctx.name,
        each("output_padding", 0),
        options.get("groups", 1),
        list(wanted),
    )
    return found


def _single(value: Any) -> int:
    return int(value[0]) if isinstance(value, tuple | list) else int(value)
