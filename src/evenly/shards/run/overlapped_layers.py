"""Layers with a redistributed input: backward overlaps the input's communication with the weight's gradient.

Forward copies or gathers the input. Backward computes the input's gradient first, starts its sum over ranks, and
computes the gradient of the weight while the sum is pending.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch.nn import functional as F  # noqa: N812

from evenly.comm import Redistribute
from evenly.shards.run.op_instance import NodeValue
from evenly.shards.run.ops import AutogradContext

CONV = ("stride", "padding", "dilation", "groups")
CONV_TRANSPOSE = ("stride", "padding", "output_padding", "groups", "dilation")
LayerOptions = Mapping[str, int | tuple[int, ...] | list[int]]  # stride, padding, ...: one number, or one per dim
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]  # of input, weight and bias


def overlapped_layer(
    redistribute: Redistribute,
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: LayerOptions,
) -> torch.Tensor:
    """Returns the output of the layer `name` (conv2d, linear, ...) for the redistributed input, differentiable."""
    x, weight, bias = to_autocast_dtype(x), to_autocast_dtype(weight), bias if bias is None else to_autocast_dtype(bias)
    y: torch.Tensor = _OverlappedLayer.apply(x, weight, bias, redistribute, name, options)[0]  # type: ignore[no-untyped-call]  # torch has no annotation here
    return y


def to_autocast_dtype(x: torch.Tensor) -> torch.Tensor:
    """Returns x in autocast's dtype if autocast is on: all ranks of a collective need one dtype, devices may differ."""
    if not torch.is_autocast_enabled(x.device.type) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def layer_options(name: str, args: tuple[NodeValue, ...], kwargs: Mapping[str, NodeValue]) -> LayerOptions | None:
    """Returns the layer's arguments after input, weight and bias, by name; None if the padding is a string."""
    if name == "linear":
        return {}
    names = CONV_TRANSPOSE if "transpose" in name else CONV
    options = dict(zip(names, args, strict=False)) | {key: kwargs[key] for key in names if key in kwargs}
    return None if isinstance(options.get("padding"), str) else options


class _LayerContext(AutogradContext, Protocol):
    redistribute: Redistribute
    layer_name: str
    options: LayerOptions
    has_bias: bool


class _OverlappedLayer(torch.autograd.Function):
    """A layer after the redistribution of its input; backward sums the input's gradient during the weight's.

    The redistributed input is an output too: gradients of gradients come back through it, and are sent only once.
    """

    @staticmethod
    def forward(
        ctx: _LayerContext,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        redistribute: Redistribute,
        name: str,
        options: LayerOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        moved_input = redistribute.forward(x).wait()
        moved_input = moved_input.view_as(x) if moved_input is x else moved_input
        # With a frozen weight, backward needs only the input's shape.
        saved_input = moved_input if ctx.needs_input_grad[1] else moved_input.new_empty(1).expand(moved_input.shape)
        ctx.save_for_backward(saved_input, weight)
        ctx.set_materialize_grads(False)
        ctx.redistribute = redistribute
        ctx.layer_name = name
        ctx.options = options
        ctx.has_bias = bias is not None
        with torch.autocast(x.device.type, enabled=False):
            run: Callable[..., torch.Tensor] = getattr(F, name)
            return run(moved_input, weight, bias, **options), moved_input

    @staticmethod
    def backward(
        ctx: _LayerContext, gradient: torch.Tensor | None, of_moved_input: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        with ctx.redistribute.shard_group.reporting():
            return _OverlappedLayer._gradients(ctx, gradient, of_moved_input)

    @staticmethod
    def _gradients(
        ctx: _LayerContext, gradient: torch.Tensor | None, of_moved_input: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_input, for_weight, for_bias = ctx.needs_input_grad[:3]
        gradients = _gradients_of_linear if ctx.layer_name == "linear" else _gradients_of_conv
        local_gradient = gradients(ctx, gradient, x, weight, (True, False, False))[0] if for_input else None
        if local_gradient is None or of_moved_input is None:
            local_gradient = local_gradient if of_moved_input is None else of_moved_input
        else:
            local_gradient = local_gradient + of_moved_input
        if torch.is_grad_enabled():  # create_graph=True
            input_gradient = None if local_gradient is None else ctx.redistribute.adjoint(local_gradient)
            _, weight_gradient, bias_gradient = gradients(ctx, gradient, x, weight, (False, for_weight, for_bias))
            return input_gradient, weight_gradient, bias_gradient, None, None, None
        pending_input_gradient = None if local_gradient is None else ctx.redistribute.backward(local_gradient)
        _, weight_gradient, bias_gradient = gradients(ctx, gradient, x, weight, (False, for_weight, for_bias))
        input_gradient = None if pending_input_gradient is None else pending_input_gradient.wait()
        return input_gradient, weight_gradient, bias_gradient, None, None, None


def _gradients_of_linear(
    ctx: _LayerContext,
    gradient: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    output_mask: tuple[bool, bool, bool],
) -> Gradients:
    if gradient is None:
        return None, None, None
    rows, inputs = (t.flatten(0, -2) if t.ndim > 1 else t[None] for t in (gradient, x))
    return (
        gradient @ weight if output_mask[0] else None,
        rows.T @ inputs if output_mask[1] else None,
        rows.sum(0) if output_mask[2] else None,
    )


def _gradients_of_conv(
    ctx: _LayerContext,
    gradient: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    output_mask: tuple[bool, bool, bool],
) -> Gradients:
    if gradient is None or not any(output_mask):
        return None, None, None
    dims, options = x.ndim - 2, ctx.options

    def per_dim(key: str, default: int) -> list[int]:
        value = options.get(key, default)
        return list(value) if isinstance(value, tuple | list) and len(value) == dims else [_single(value)] * dims

    gradients: Gradients = torch.ops.aten.convolution_backward(
        gradient,
        x,
        weight,
        [gradient.shape[1]] if ctx.has_bias else None,
        per_dim("stride", 1),
        per_dim("padding", 0),
        per_dim("dilation", 1),
        "transpose" in ctx.layer_name,
        per_dim("output_padding", 0),
        options.get("groups", 1),
        list(output_mask),
    )
    return gradients


def _single(value: int | tuple[int, ...] | list[int]) -> int:
    return int(value[0]) if isinstance(value, tuple | list) else int(value)
