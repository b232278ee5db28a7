"""Local forms of operations, by operation and mode, where they differ from torch's operation on the local parts."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from evenly._torch import pytree
from evenly._torch.modules import BatchNorm, Dropout
from evenly._torch.operators import safe_softmax
from evenly.comm import Redistribute, count_of, take
from evenly.errors import SpecError
from evenly.graph import name_of
from evenly.shards.parts.local_shards import LocalShard, local_shard_of, set_local_shard
from evenly.shards.run import ops
from evenly.shards.run.dropout import draw, drop, seeded
from evenly.shards.run.op_instance import ForwardContext, NodeValue, OpInstance
from evenly.shards.run.overlapped_layers import layer_options, overlapped_layer, to_autocast_dtype
from evenly.shards.run.recurrent import RecurrentOptions, recurrent_by_units
from evenly.spec.layout import TensorPlacement

LocalOp = Callable[..., NodeValue]  # (context, *args, **kwargs) -> the operation's output on this rank


def local_op_of(op_instance: OpInstance) -> LocalOp:
    """Returns the function that runs one operation on this rank."""
    build = BUILDERS.get((op_instance.layer.op, op_instance.choice.mode)) or BUILDERS.get((op_instance.layer.op, "*"))
    if build is not None:
        return build(op_instance)
    run = op_instance.run
    return lambda context, *args, **kwargs: run(*args, **kwargs)


def local_layer_of(
    op_instance: OpInstance,
    reads: Mapping[str, TensorPlacement],
    redistribute: Callable[[ForwardContext], Redistribute] | None,
) -> Callable[[ForwardContext, torch.Tensor | None], NodeValue]:
    """Returns the function that runs a convolution or linear layer, with its bias and the move of its input."""
    name = name_of(op_instance.node)
    local_op = local_op_of(op_instance)
    read = op_instance.reader(reads)

    def run_local(context: ForwardContext, bias: torch.Tensor | None) -> NodeValue:
        args, kwargs = read(context)
        x, weight, rest = args[0], args[1] if len(args) > 1 else kwargs["weight"], args[3:]
        if op_instance.is_idle(context):
            moved_input = x if redistribute is None else redistribute(context)(to_autocast_dtype(x))
            return op_instance.idle(
                context, [moved_input, weight] if bias is None else [moved_input, weight, bias], reads
            )
        if redistribute is not None:
            options = layer_options(name, rest, kwargs)
            if options is not None:
                return overlapped_layer(redistribute(context), name, x, weight, bias, options)
            x = redistribute(context)(to_autocast_dtype(x))
        kwargs = {key: value for key, value in kwargs.items() if key not in ("weight", "bias", "input")}
        return local_op(context, x, weight, bias, *rest, **kwargs)

    return run_local


def _view(op_instance: OpInstance) -> LocalOp:
    """Replaces the full size of the cut dim by this rank's size; sizes in the network's code are full ones."""
    (output_placement,) = op_instance.choice.gives
    shapes: dict[tuple[object, ...], tuple[int, ...]] = {}
    expands = op_instance.layer.op == "expand"

    def run_local(context: ForwardContext, x: torch.Tensor, *args: NodeValue, **kwargs: NodeValue) -> torch.Tensor:
        key = (context.samples, x.shape, *(a.shape if isinstance(a, torch.Tensor) else a for a in args))
        if key not in shapes:
            shapes[key] = tuple(op_instance.full_output(context).shape)
        shape = list(shapes[key])
        shape[output_placement.dim] = context.count(output_placement)
        return x.expand(shape) if expands else x.reshape(shape)

    return run_local


def _split(op_instance: OpInstance) -> LocalOp:
    dim = op_instance.layer.options["dim"]
    if op_instance.choice.needs[0].dim != dim:
        return lambda context, *args, **kwargs: op_instance.run(*args, **kwargs)
    return lambda context, x, *_, **__: torch.split(
        x, [context.count(placement) for placement in op_instance.choice.gives], dim
    )


def _narrow(op_instance: OpInstance) -> LocalOp:
    (need,) = op_instance.choice.needs
    options = op_instance.layer.options
    if need.dim != options["dim"]:
        return lambda context, *args, **kwargs: op_instance.run(*args, **kwargs)

    def run_local(context: ForwardContext, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        before = count_of(
            [(a, min(b, options["start"])) for a, b in context.own_segments(need) if a < options["start"]]
        )
        return x.narrow(need.dim, before, context.count(op_instance.choice.gives[0]))

    return run_local


def _sum(op_instance: OpInstance) -> LocalOp:
    """Computes this rank's summand of a sum or mean along the cut dim."""
    options = op_instance.layer.options

    def run_local(context: ForwardContext, x: torch.Tensor, *_: object, **kwargs: NodeValue) -> torch.Tensor:
        if options["name"] == "sum":
            return x.sum(options["dims"], keepdim=options["keep"], dtype=kwargs.get("dtype"))
        shape = context.full_shape(x, op_instance.choice.needs[0])
        dtype: torch.dtype = kwargs.get("dtype") or x.dtype
        wide = torch.float32 if dtype.itemsize < 4 else dtype  # a sum of 16-bit numbers may overflow
        total: torch.Tensor = x.sum(options["dims"], keepdim=options["keep"], dtype=wide)
        mean: torch.Tensor = (total / prod(shape[dim] for dim in options["dims"])).to(dtype)
        return mean

    return run_local


def _group_conv(op_instance: OpInstance) -> LocalOp:
    groups = op_instance.layer.options["groups"]

    def run_local(
        context: ForwardContext, x: torch.Tensor, weight: torch.Tensor, *args: NodeValue, **kwargs: NodeValue
    ) -> torch.Tensor:
        local_groups = groups * context.count(op_instance.choice.needs[0]) // context.size(op_instance.choice.needs[0])
        if len(args) > 4:
            args = (*args[:4], local_groups, *args[5:])
        else:
            kwargs = {**kwargs, "groups": local_groups}
        y: torch.Tensor = op_instance.run(x, weight, *args, **kwargs)
        return y

    return run_local


def _group_norm(op_instance: OpInstance) -> LocalOp:
    def run_local(
        context: ForwardContext,
        x: torch.Tensor,
        groups: int,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        *_: object,
    ) -> torch.Tensor:
        need = op_instance.choice.needs[0]
        if op_instance.choice.mode == "local":
            return F.group_norm(x, groups * context.count(need) // context.size(need), weight, bias, eps)
        channels = context.size(need)
        return ops.group_norm(
            x,
            groups,
            weight,
            bias,
            eps,
            channels=channels,
            segments=context.own_segments(need),
            shard_group=context.shard_group,
        )

    return run_local


def _layer_norm(op_instance: OpInstance) -> LocalOp:
    def run_local(
        context: ForwardContext,
        x: torch.Tensor,
        shape: object,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        *_: object,
    ) -> torch.Tensor:
        return ops.layer_norm(x, weight, bias, context.size(op_instance.choice.needs[0]), eps, context.shard_group)

    return run_local


def _rms_norm(op_instance: OpInstance) -> LocalOp:
    def run_local(
        context: ForwardContext,
        x: torch.Tensor,
        _: object,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        return ops.rms_norm(x, weight, context.size(op_instance.choice.needs[0]), eps, context.shard_group)

    return run_local


def _embedding_rows(op_instance: OpInstance) -> LocalOp:
    need = op_instance.choice.needs[1]

    def run_local(
        context: ForwardContext,
        ids: torch.Tensor,
        weight: torch.Tensor,
        padding: int | None = None,
        *_: object,
        **kwargs: NodeValue,
    ) -> torch.Tensor:
        return ops.embed_rows(
            ids, weight, context.own_segments(need), context.size(need), kwargs.get("padding_idx", padding)
        )

    return run_local


def _vocabulary(op_instance: OpInstance) -> LocalOp:
    def run_local(
        context: ForwardContext, logits: torch.Tensor, target: torch.Tensor, *args: NodeValue, **kwargs: NodeValue
    ) -> torch.Tensor:
        names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        options = dict(zip(names, args, strict=False)) | kwargs
        return ops.cross_entropy(
            logits,
            target,
            context.own_segments(op_instance.choice.needs[0]),
            context.shard_group,
            size=context.size(op_instance.choice.needs[0]),
            ignored=options.get("ignore_index", -100),
            reduction=options.get("reduction", "mean"),
        )

    return run_local


def _dropout(op_instance: OpInstance) -> LocalOp:
    (need,) = op_instance.choice.needs
    module = (
        op_instance.model.get_submodule(str(op_instance.node.target)) if op_instance.node.op == "call_module" else None
    )

    def run_local(
        context: ForwardContext, x: torch.Tensor, p: float = 0.5, training: bool = True, *_: object, **__: object
    ) -> torch.Tensor:
        if isinstance(module, Dropout):
            p, training = module.p, module.training
        if not training:
            return x
        key = context.dropout_stream.key(op_instance.number)
        shared = op_instance.layer.options["dims"]
        if need.state != "sharded":
            return drop(x, p, key, shared=shared)
        return drop(
            x, p, key, dim=need.dim, segments=context.own_segments(need), full=context.size(need), shared=shared
        )

    return run_local


def _attention(op_instance: OpInstance) -> LocalOp:
    """Runs torch's attention; with dropout, an attention whose mask depends on positions in the full tensor."""
    need = op_instance.choice.needs[0]

    def run_local(
        context: ForwardContext,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: NodeValue,
        **kwargs: NodeValue,
    ) -> torch.Tensor:
        names = ("attn_mask", "dropout_p", "is_causal")
        options = dict(zip(names, args, strict=False)) | kwargs
        if not options.get("dropout_p"):
            return F.scaled_dot_product_attention(q, k, v, **options)
        if options.get("enable_gqa") and q.shape[-3] != k.shape[-3]:
            k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
        scores = (q * (options.get("scale") or q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)
        mask = options.get("attn_mask")
        if options.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
        key, weights = context.dropout_stream.key(op_instance.number), safe_softmax(scores)
        if need.state != "sharded":
            return drop(weights, options["dropout_p"], key) @ v
        segments, full = context.own_segments(need), context.size(need)
        return drop(weights, options["dropout_p"], key, dim=need.dim, segments=segments, full=full) @ v

    return run_local


def _recurrent(op_instance: OpInstance) -> LocalOp:
    """Runs recurrent layers on this rank's samples; a rank without samples gives empty outputs."""
    run = op_instance.run

    def run_local(
        context: ForwardContext,
        x: torch.Tensor,
        states: list[torch.Tensor],
        weights: list[torch.Tensor],
        *options: NodeValue,
    ) -> NodeValue:
        if x.numel():
            return run(x, states, weights, *options)
        inputs = (x, list(states), list(weights))
        shapes = run(*pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("meta"), inputs), *options)
        linked = [x, *states, *weights]
        return tuple(ops.linked_zeros(output.shape, *linked, dependence="all") for output in shapes)

    return run_local


def _recurrent_units(op_instance: OpInstance) -> LocalOp:
    """Runs recurrent layers on this rank's units; a rank without units takes part in the gathers."""
    hidden_placement = op_instance.choice.gives[1]
    is_state_shared = op_instance.layer.options["states"] == 1  # hidden states and cells of an LSTM begin as one tensor

    def run_local(
        context: ForwardContext,
        x: torch.Tensor,
        states: list[torch.Tensor],
        weights: list[torch.Tensor],
        *arguments: Any,
    ) -> NodeValue:
        options, segments = RecurrentOptions(*arguments), context.segments(hidden_placement)
        if is_state_shared and options.mode == "LSTM":
            states = [states[0], take(states[1], 2, segments[context.shard_group.rank])]
        gather = Redistribute(context.shard_group, "gather_for_ranks", 2, segments)
        return recurrent_by_units(x, states, weights, gather, options)

    return run_local


def _whole_module(op_instance: OpInstance) -> LocalOp:
    """Calls a module that is computed whole; buffers that it replaces are whole on every rank, as the old ones."""
    run, path = op_instance.run, str(op_instance.node.target)
    if op_instance.node.op != "call_module":
        return lambda context, *args, **kwargs: run(*args, **kwargs)
    module = op_instance.model.get_submodule(path)

    def run_local(context: ForwardContext, *args: NodeValue, **kwargs: NodeValue) -> NodeValue:
        result = run(*args, **kwargs)
        for name, buffer in module.named_buffers(prefix=path):
            if local_shard_of(buffer) is None:
                set_local_shard(buffer, LocalShard(name, buffer.shape, context.shard_group))
        return result

    return run_local


def _random(op_instance: OpInstance) -> LocalOp:
    """Runs an operation without a rule that draws random numbers itself, from the same seed on every rank."""
    run = _whole_module(op_instance)

    def run_local(context: ForwardContext, *args: NodeValue, **kwargs: NodeValue) -> NodeValue:
        devices = {x.device.type for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        if devices - {"cpu"}:
            raise SpecError(
                f"{op_instance.layer.where or op_instance.layer.name!r} is computed whole and draws random numbers on "
                f"{sorted(devices)}, whose generators differ from those of other devices. Write it with dropout, or "
                "draw the numbers outside and pass them as an input."
            )
        with seeded(context.dropout_stream.key(op_instance.number)):
            return run(context, *args, **kwargs)

    return run_local


def _instance_norm(op_instance: OpInstance) -> LocalOp:
    module: Any = op_instance.run  # its forward would expect the channels of all ranks

    def run_local(context: ForwardContext, x: torch.Tensor) -> torch.Tensor:
        uses_batch_statistics = module.training or not module.track_running_stats
        rate = module.momentum if module.momentum is not None else 0.0
        running = (module.running_mean, module.running_var)
        return F.instance_norm(x, *running, module.weight, module.bias, uses_batch_statistics, rate, module.eps)

    return run_local


def _batch_norm(op_instance: OpInstance) -> LocalOp:
    if op_instance.node.op != "call_module":
        return _functional_batch_norm(op_instance)
    module = op_instance.run
    affine_keys = [(name, need) for name, need in op_instance.needs.items() if name.endswith((".weight", ".bias"))]

    def run_local(context: ForwardContext, x: torch.Tensor) -> NodeValue:
        if not isinstance(module, BatchNorm):
            return module(x)
        return ops.module_batch_norm(
            x, module, [context.values[key] for key in affine_keys], context.samples, context.shard_group
        )

    return run_local


def _functional_batch_norm(op_instance: OpInstance) -> LocalOp:
    def run_local(
        context: ForwardContext,
        x: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        *_: object,
    ) -> torch.Tensor:
        return ops.batch_norm(
            x, running_mean, running_var, weight, bias, training, momentum, eps, context.samples, context.shard_group
        )

    return run_local


def _draw(op_instance: OpInstance) -> LocalOp:
    """Draws the numbers of the full tensor on every rank, by a generator that depends on the step and the layer."""
    name, target = name_of(op_instance.node), op_instance.run

    def run_local(context: ForwardContext, *args: NodeValue, **kwargs: NodeValue) -> torch.Tensor:
        return draw(name, target, args, kwargs, context.dropout_stream.key(op_instance.number))

    return run_local


# By operation and mode; * is any mode.
BUILDERS: dict[tuple[str, str], Callable[[OpInstance], LocalOp]] = {
    ("view", "local"): _view,
    ("expand", "local"): _view,
    ("split", "local"): _split,
    ("narrow", "local"): _narrow,
    ("sum", "reduced"): _sum,
    ("conv", "grouped"): _group_conv,
    ("group_norm", "local"): _group_norm,
    ("group_norm", "moments"): _group_norm,
    ("layer_norm", "moments"): _layer_norm,
    ("rms_norm", "moments"): _rms_norm,
    ("batch_norm", "moments"): _batch_norm,
    ("instance_norm", "local"): _instance_norm,
    ("embedding", "rows"): _embedding_rows,
    ("cross_entropy", "vocabulary"): _vocabulary,
    ("dropout", "*"): _dropout,
    ("draw", "*"): _draw,
    ("random", "*"): _random,
    ("opaque", "*"): _whole_module,
    ("attention", "*"): _attention,
    ("recurrent", "bystander"): _recurrent,
    ("recurrent", "units"): _recurrent_units,
}
