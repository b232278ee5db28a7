"""The table that gives every traced operation its kind. A new layer is one row here and one test."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.fx.node import Argument

from evenly.graph.shapes import MetaValue
from evenly.spec.graph import Kind

Option = bool | int | str | list[int] | list[str]


@dataclass(frozen=True)
class OpKind:
    """The kind of an operation, its name in our vocabulary, and its options."""

    kind: Kind
    op: str
    options: dict[str, Option] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class OpInputs:
    """A node with the meta values of all nodes."""

    node: fx.Node
    name: str
    values: dict[str, MetaValue]
    module: nn.Module | None = None

    def argument(self, position: int, key: str, default: Argument = None) -> MetaValue:
        """Returns an argument with nodes replaced by their values."""
        args, kwargs = self.node.args, self.node.kwargs
        raw = args[position] if len(args) > position else kwargs.get(key, default)
        return fx.map_arg(raw, lambda node: self.values[node.name])

    @property
    def first(self) -> torch.Tensor:
        """The first input tensor."""
        value: torch.Tensor = self.values[self.node.all_input_nodes[0].name]
        return value

    @property
    def tensor_nodes(self) -> list[fx.Node]:
        """The inputs that are tensors."""
        return [node for node in self.node.all_input_nodes if isinstance(self.values[node.name], torch.Tensor)]

    @property
    def ndim(self) -> int:
        """The number of dims of the first tensor."""
        return self.first.ndim


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


UNARY = _words(
    """
    abs acos acosh asin asinh atan atanh ceil celu clamp clip clone contiguous cos cosh detach double elu erf erfc exp
    expm1 float floor gelu half hardshrink hardsigmoid hardswish hardtanh leaky_relu log log10 log1p log2 log_sigmoid
    logsigmoid mish nan_to_num neg negative positive reciprocal relu relu6 round rsqrt selu sigmoid sign silu sin sinh
    softplus softshrink softsign sqrt square tan tanh tanhshrink threshold to trunc type type_as bfloat16 logical_not
    isnan isinf float_mask ones_like zeros_like full_like empty_like ReLU ReLU6 GELU SiLU Sigmoid Tanh ELU CELU SELU
    LeakyReLU Hardswish Hardsigmoid Hardtanh Softplus Mish LogSigmoid Hardshrink Softshrink Softsign Tanhshrink
    Threshold Identity
    """
)
LINEAR = _words("neg negative contiguous clone to float double type type_as Identity positive")
JOINS = _words(
    """
    add sub subtract mul multiply div divide true_divide truediv floordiv pow rsub maximum minimum where masked_fill eq
    ne lt le gt ge and_ or_ logical_and logical_or fmod remainder atan2 lerp addcmul addcdiv mod
    """
)
SPATIAL = _words(
    """
    max_pool avg_pool adaptive_avg_pool adaptive_max_pool lp_pool MaxPool AvgPool AdaptiveAvgPool AdaptiveMaxPool LPPool
    ZeroPad ConstantPad ReflectionPad ReplicationPad CircularPad
    """
)
DRAWS = _words(
    """
    rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal poisson draw_like
    """
)
RANDOM = _words(
    """
    rrelu RReLU feature_dropout alpha_dropout AlphaDropout FeatureAlphaDropout feature_alpha_dropout
    fractional_max_pool2d
    """
)
FILLED = _words("new_empty new_zeros new_ones new_full new_tensor")  # tensors that only take the dtype of another
VIEWS = _words(
    "view reshape flatten unflatten squeeze unsqueeze _unsafe_view view_as reshape_as ravel Flatten Unflatten"
)


def row_of(call: OpInputs) -> OpKind:
    """Returns the row of the table for one node."""
    rule = RULES.get(call.name)
    if rule is not None:
        return rule(call)
    stem = call.name[:-2].rstrip("_") if call.name[-2:] in ("1d", "2d", "3d") else call.name
    if stem in SPATIAL:
        return _spatial(call, stem)
    return opaque(f"{call.name} has no rule")


def opaque(note: str) -> OpKind:
    """Returns the row of an operation that is computed whole."""
    return OpKind("opaque", "opaque", note=note)


def _positive(dim: int, ndim: int) -> int:
    return dim % ndim if ndim else 0


def _unary(call: OpInputs) -> OpKind:
    if len(call.tensor_nodes) > 1:
        return OpKind("joining", "join", {"linear": False})
    out = call.values[call.node.name]  # a cast to integers is not linear
    return OpKind(
        "pointwise", "unary", {"linear": call.name in LINEAR and (out.is_floating_point() or out.is_complex())}
    )


def _join(call: OpInputs) -> OpKind:
    positions = [isinstance(call.argument(i, ""), torch.Tensor) for i in range(len(call.node.args))]
    if len(call.tensor_nodes) == 1 and sum(positions) == 1:
        plain = positions[0] and call.node.kwargs.get("rounding_mode") is None
        scaled = call.name in ("mul", "multiply") or (call.name in ("div", "divide", "truediv") and plain)
        return OpKind("pointwise", "unary", {"linear": scaled})
    both = len(positions) > 1 and all(positions)
    return OpKind("joining", "join", {"linear": call.name in ("add", "sub", "subtract") and both})


def _spatial(call: OpInputs, stem: str) -> OpKind:
    if isinstance(call.values[call.node.name], tuple) or (
        call.module is not None and bool(getattr(call.module, "return_indices", False))
    ):
        return opaque("it returns indices")
    dims = int(call.name[-2])
    return OpKind(
        "per channel", "spatial", {"first": call.ndim - dims, "linear": "avg" in stem.lower() or stem == "ZeroPad"}
    )


def _resized(call: OpInputs) -> OpKind:
    return OpKind("per channel", "spatial", {"first": 2, "linear": False})


def _padded(call: OpInputs) -> OpKind:
    return OpKind("per channel", "spatial", {"first": call.ndim - len(call.argument(1, "pad")) // 2, "linear": False})


def _along(position: int, default: int | None = None) -> Callable[[OpInputs], OpKind]:
    def rule(call: OpInputs) -> OpKind:
        dim = getattr(call.module, "dim", None) if call.module is not None else call.argument(position, "dim", default)
        out = call.values[call.node.name]
        if not isinstance(dim, int) or not isinstance(out, torch.Tensor) or out.shape != call.first.shape:
            return opaque("it does not say along which dim")
        return OpKind("along", "along", {"dim": _positive(dim, call.ndim)})

    return rule


def _rolled(call: OpInputs) -> OpKind:
    dims = call.argument(2, "dims", ())
    chosen = [dims] if isinstance(dims, int) else list(dims)
    if not chosen:
        return opaque("it rolls all dims as one")
    return OpKind("along", "roll", {"dims": [_positive(dim, call.ndim) for dim in chosen], "linear": True})


def _linear(call: OpInputs) -> OpKind:
    weight = call.argument(1, "weight")
    if weight.ndim != 2 or call.argument(2, "bias") is not None:
        return opaque("its weight or bias has an unusual shape")
    return OpKind("mixing", "linear")


def _view(call: OpInputs) -> OpKind:
    arguments = [*call.node.args[1:], *call.node.kwargs.values()]
    if any(isinstance(argument, torch.dtype) for argument in arguments):
        return opaque("it reads numbers as another type")
    if call.name == "squeeze" and not arguments:
        return opaque("squeeze without a dim looks at the batch too")
    return OpKind("reshaping", "view")


def _conv(call: OpInputs) -> OpKind:
    transposed = "transpose" in call.name
    if call.argument(2, "bias") is not None:
        return opaque("its bias has an unusual shape")
    groups = call.argument(6, "groups", 1)
    if call.ndim != int(call.name[-2] if call.name[-1] == "d" else call.ndim - 2) + 2:
        return opaque("its input has no batch dim")
    return OpKind("mixing", "conv", {"groups": int(groups), "transposed": transposed})


def _embedding(call: OpInputs) -> OpKind:
    is_unsupported = call.argument(5, "scale_grad_by_freq", False) or call.argument(6, "sparse", False)
    if call.argument(3, "max_norm") is not None or is_unsupported:
        return opaque("max_norm, scale_grad_by_freq and sparse gradients have no rule")
    return OpKind("mixing", "embedding")


def _norm(op: str) -> Callable[[OpInputs], OpKind]:
    def rule(call: OpInputs) -> OpKind:
        if op == "group_norm":
            return OpKind("per channel", op, {"groups": int(call.argument(1, "num_groups"))})
        shape = call.argument(1, "normalized_shape")
        return OpKind("per channel", op, {"first": call.ndim - len(tuple(shape))})

    return rule


def _batch_norm(call: OpInputs) -> OpKind:
    if call.ndim < 2:
        return opaque("its input has no channel dim")
    return OpKind("per channel", "batch_norm")


def _functional_batch_norm(call: OpInputs) -> OpKind:
    row = _batch_norm(call)
    if row.op == "opaque":
        return row
    arguments = [
        call.node.args[position] if len(call.node.args) > position else call.node.kwargs.get(key)
        for position, key in enumerate(("running_mean", "running_var"), start=1)
    ]
    nodes = call.tensor_nodes
    statistics = [nodes.index(argument) for argument in arguments if isinstance(argument, fx.Node)]
    return OpKind("per channel", "batch_norm", {"statistics": statistics})


def _instance_norm(call: OpInputs) -> OpKind:
    expected = int(call.name[-2]) + 2
    if call.ndim != expected:
        return opaque("its input has no batch dim")
    return OpKind("per channel", "instance_norm")


def _prelu(call: OpInputs) -> OpKind:
    return OpKind("per channel", "prelu")


def _dropout(call: OpInputs) -> OpKind:
    if call.name in ("dropout", "Dropout"):
        return OpKind("pointwise", "dropout", {"dims": []})
    if call.ndim < 3:
        return opaque("channel dropout of a tensor without spatial dims")
    return OpKind("pointwise", "dropout", {"dims": list(range(2, call.ndim))})


def _concat(call: OpInputs) -> OpKind:
    operands = call.node.args[0] if call.node.args else ()
    if not isinstance(operands, tuple | list) or list(operands) != call.node.all_input_nodes:
        return opaque("it joins a tensor with itself, or tensors that are not named one by one")
    tensors = call.argument(0, "tensors")
    if any(tensor.ndim == 1 and not tensor.numel() for tensor in tensors):
        return opaque("it joins an empty tensor")
    dim = call.argument(1, "dim", call.node.kwargs.get("axis", 0))
    return OpKind("joining", "concat", {"dim": _positive(dim, tensors[0].ndim)})


def _permute(call: OpInputs) -> OpKind:
    ndim, name = call.ndim, call.name
    dims = list(range(ndim))
    if name == "permute":
        first_dims = call.argument(1, "dims")
        chosen = (
            first_dims if isinstance(first_dims, list | tuple) else [call.argument(i, "") for i in range(1, 1 + ndim)]
        )
        dims = [_positive(dim, ndim) for dim in chosen]
    elif name in ("transpose", "swapaxes", "swapdims"):
        keyword = "axis" if name == "swapaxes" and "axis0" in call.node.kwargs else "dim"
        a, b = (_positive(call.argument(i, f"{keyword}{i - 1}"), ndim) for i in (1, 2))
        dims[a], dims[b] = dims[b], dims[a]
    elif ndim > 1:  # t, mT, T of a matrix
        dims[-1], dims[-2] = dims[-2], dims[-1]
    return OpKind("reshaping", "permute", {"dims": dims})


def _split(call: OpInputs) -> OpKind:
    position = 2 if call.name != "unbind" else 1
    dim = _positive(call.argument(position, "dim", 0), call.ndim)
    if call.name == "unbind":
        return OpKind("reshaping", "unbind", {"dim": dim})
    return OpKind(
        "reshaping", "split", {"dim": dim, "sizes": [part.shape[dim] for part in call.values[call.node.name]]}
    )


def _item(call: OpInputs) -> OpKind:
    index = call.argument(1, "")
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [item for item in index if not isinstance(item, torch.Tensor)]:
        position = index.index(Ellipsis)
        missing = call.ndim - sum(item is not None for item in index) + 1
        index = (*index[:position], *[slice(None)] * missing, *index[position + 1 :])
    dims_after: list[int] = []
    out, cut = 0, []
    for item in (*index, *[slice(None)] * (call.ndim - sum(item is not None for item in index))):
        if item is None:
            out += 1
        elif isinstance(item, slice):
            is_full = item in (slice(None), slice(0, None), slice(None, None, 1))
            dims_after.append(out if is_full else -1)
            cut += [] if is_full else [(len(dims_after) - 1, item)]
            out += 1
        elif isinstance(item, int):
            dims_after.append(-1)
        else:
            return opaque("it is indexed by a tensor")
    simple = len(cut) == 1 and len(index) <= call.ndim and out == call.ndim and None not in index
    if simple and cut[0][1].step in (None, 1):
        dim = cut[0][0]
        start, stop, _ = cut[0][1].indices(call.first.shape[dim])
        return OpKind("reshaping", "narrow", {"dim": dim, "start": start, "stop": max(start, stop)})
    return OpKind("reshaping", "index", {"kept": dims_after})


def _narrow(call: OpInputs) -> OpKind:
    dim, start, length = (call.argument(i, key) for i, key in ((1, "dim"), (2, "start"), (3, "length")))
    dim = _positive(dim, call.ndim)
    start = start % max(1, call.first.shape[dim])
    return OpKind("reshaping", "narrow", {"dim": dim, "start": start, "stop": start + length})


def _select(call: OpInputs) -> OpKind:
    dim = _positive(call.argument(1, "dim"), call.ndim)
    dims_after = [d if d < dim else -1 if d == dim else d - 1 for d in range(call.ndim)]
    return OpKind("reshaping", "index", {"kept": dims_after})


def _sum(call: OpInputs) -> OpKind:
    out = call.values[call.node.name]
    if not isinstance(out, torch.Tensor):
        return opaque("it also returns indices")
    dims = call.argument(1, "dim")
    chosen = (
        list(range(call.ndim)) if dims is None or dims in ((), []) else [dims] if isinstance(dims, int) else list(dims)
    )
    keep = out.ndim == call.ndim
    options: dict[str, Option] = {
        "dims": sorted(_positive(dim, call.ndim) for dim in chosen),
        "keep": keep,
        "name": call.name,
    }
    return OpKind("reshaping", "sum", options)


def _repeat(call: OpInputs) -> OpKind:
    times, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    if not isinstance(times, int) or not isinstance(dim, int):
        return opaque("unequal repeats have no rule")
    return OpKind("reshaping", "repeat", {"dim": _positive(dim, call.ndim), "times": times})


def _shuffled(call: OpInputs) -> OpKind:
    factor = call.argument(1, "upscale_factor") if call.module is None else vars(call.module)["upscale_factor"]
    if call.ndim != 4:
        return opaque("its input has no batch dim")
    return OpKind("reshaping", "pixel_shuffle", {"units": int(factor) ** 2})


def _attention(call: OpInputs) -> OpKind:
    query, key, value = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    if query.ndim < 4 or key.ndim != query.ndim or value.ndim != query.ndim:
        return opaque("its heads have no dim of their own")
    return OpKind("mixing", "attention")


def _cross_entropy(call: OpInputs) -> OpKind:
    target = call.argument(1, "target")
    plain = call.argument(2, "weight") is None and not call.argument(7, "label_smoothing", 0.0)
    plain = plain and call.argument(3, "size_average") is None and call.argument(5, "reduce") is None
    if target.dtype != torch.long or not plain or call.ndim < 2:
        return opaque("class weights, smoothing and soft targets have no rule")
    return OpKind("mixing", "cross_entropy")


def _recurrent(call: OpInputs) -> OpKind:
    states = call.node.args[1]
    names = {node.name for node in states if isinstance(node, fx.Node)} if isinstance(states, list | tuple) else set()
    options: dict[str, Option] = {
        "name": str(call.argument(3, "mode")),
        "states": len(names),
        "batch": 0 if call.argument(8, "batch_first") else 1,
    }
    return OpKind("mixing", "recurrent", options)


def _matmul(call: OpInputs) -> OpKind:
    shapes = [call.values[node.name].ndim for node in call.node.all_input_nodes]
    return (
        OpKind("mixing", "matmul")
        if len(shapes) == 2 and min(shapes) >= 2
        else opaque("it multiplies vectors or itself")
    )


RULES: dict[str, Callable[[OpInputs], OpKind]] = {
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(JOINS, _join),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _conv),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv),
    **dict.fromkeys(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"), _batch_norm),
    **dict.fromkeys(("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"), _instance_norm),
    **dict.fromkeys(("dropout", "Dropout", "dropout1d", "dropout2d", "dropout3d"), _dropout),
    **dict.fromkeys(("Dropout1d", "Dropout2d", "Dropout3d"), _dropout),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "_softmax"), _along(1)),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Softmin"), _along(1)),
    **dict.fromkeys(("cumsum", "cumprod"), _along(1)),
    **dict.fromkeys(("cat", "concat", "concatenate"), _concat),
    **dict.fromkeys(("permute", "transpose", "swapaxes", "swapdims", "t"), _permute),
    **dict.fromkeys(("chunk", "split", "tensor_split", "unbind", "split_with_sizes"), _split),
    **dict.fromkeys(("mean", "sum", "amax", "amin"), _sum),
    **dict.fromkeys(("interpolate", "upsample", "Upsample", "UpsamplingNearest2d", "UpsamplingBilinear2d"), _resized),
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    **dict.fromkeys(("pixel_shuffle", "PixelShuffle"), _shuffled),
    **dict.fromkeys(DRAWS, lambda call: OpKind("pointwise", "draw")),
    **dict.fromkeys(FILLED, lambda call: OpKind("source", "constant")),
    **dict.fromkeys(RANDOM, lambda call: opaque("it draws random numbers")),
    "add_bias": lambda call: OpKind("per channel", "bias", {"dim": _positive(call.argument(2, "dim"), call.ndim)}),
    "assign": lambda call: OpKind("joining", "assign"),
    "batch_norm": _functional_batch_norm,
    "fill": _unary,
    "overwrite": lambda call: opaque("forward writes into a part of a tensor"),
    "pad": _padded,
    "linear": _linear,
    "embedding": _embedding,
    "group_norm": _norm("group_norm"),
    "layer_norm": _norm("layer_norm"),
    "rms_norm": _norm("rms_norm"),
    "prelu": _prelu,
    "getitem": _item,
    "narrow": _narrow,
    "roll": _rolled,
    "select": _select,
    "expand": lambda call: OpKind("reshaping", "expand"),
    "recurrent": _recurrent,
    "repeat_interleave": _repeat,
    "scaled_dot_product_attention": _attention,
    "cross_entropy": _cross_entropy,
}
