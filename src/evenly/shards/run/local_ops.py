"""What one rank does for an operation and mode, where that is not simply the operation itself on its parts."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from evenly._torch.modules import BatchNorm, Dropout
from evenly._torch.operators import safe_softmax
from evenly.comm import Redistribute, ShardGroup, count_of
from evenly.graph import name_of
from evenly.shards.run import ops
from evenly.shards.run.dropout import drop
from evenly.shards.run.op_instance import ForwardContext, OpInstance
from evenly.shards.run.overlapped_layers import layer_options, lowered, mixed
from evenly.spec.layout import Move, Segments, TensorPlacement

Act = Callable[..., Any]  # (now, *args, **kwargs) -> what the operation gives on this rank


def act_of(op_instance: OpInstance) -> Act:
    """Returns what this rank does at one operation."""
    made = LOCAL.get((op_instance.layer.op, op_instance.choice.mode)) or LOCAL.get((op_instance.layer.op, "*"))
    if made is not None:
        return made(op_instance)
    run = op_instance.run
    return lambda now, *args, **kwargs: run(*args, **kwargs)


def layer_of(
    op_instance: OpInstance, entry: Move | None, shard_group: ShardGroup
) -> Callable[[ForwardContext, Mapping[str, TensorPlacement], Any], Any]:
    """Returns what this rank does at a convolution or linear layer, with its bias and the move of its input."""
    name = name_of(op_instance.node)
    plain = act_of(op_instance)
    cut = None
    if entry is not None:
        cut = entry.before if entry.before.state == "sharded" else entry.after

    def act(now: ForwardContext, reads: Mapping[str, TensorPlacement], bias: torch.Tensor | None) -> Any:
        args, kwargs = op_instance.switched(lambda n: now.values[n.name, reads.get(n.name)])
        x, weight, rest = args[0], args[1] if len(args) > 1 else kwargs["weight"], args[3:]
        if op_instance.is_idle(now):
            entered = (
                Redistribute(shard_group, entry.name, cut.dim, _segments(now, cut))(lowered(x)) if entry and cut else x
            )
            return op_instance.idle(now, [entered, weight] if bias is None else [entered, weight, bias], reads)
        options = layer_options(name, rest, kwargs) if entry is not None else None
        if entry is not None and cut is not None and options is not None:
            return mixed(
                Redistribute(shard_group, entry.name, cut.dim, _segments(now, cut)), name, x, weight, bias, options
            )
        if entry is not None and cut is not None:
            x = Redistribute(shard_group, entry.name, cut.dim, _segments(now, cut))(lowered(x))
        kwargs = {key: value for key, value in kwargs.items() if key not in ("weight", "bias", "input")}
        return plain(now, x, weight, bias, *rest, **kwargs)

    return act


def _segments(now: ForwardContext, record: TensorPlacement) -> tuple[Segments, ...]:
    return now.segments(record) if record.state == "sharded" else ()


def _view(op_instance: OpInstance) -> Act:
    """Sizes written into the network are full ones; the dim that is cut gets this rank's size."""
    (given,) = op_instance.choice.gives
    shapes: dict[Any, tuple[int, ...]] = {}
    expands = op_instance.layer.op == "expand"

    def act(now: ForwardContext, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        key = (now.samples, x.shape, *(a.shape if isinstance(a, torch.Tensor) else a for a in args))
        if key not in shapes:
            shapes[key] = tuple(op_instance.full_output(now).shape)
        shape = list(shapes[key])
        shape[given.dim] = now.count(given)
        return x.expand(shape) if expands else x.reshape(shape)

    return act


def _split(op_instance: OpInstance) -> Act:
    dim = op_instance.layer.options["dim"]
    if op_instance.choice.needs[0].dim != dim:
        return lambda now, *args, **kwargs: op_instance.run(*args, **kwargs)
    return lambda now, x, *_, **__: torch.split(x, [now.count(record) for record in op_instance.choice.gives], dim)


def _narrow(op_instance: OpInstance) -> Act:
    (need,) = op_instance.choice.needs
    options = op_instance.layer.options
    if need.dim != options["dim"]:
        return lambda now, *args, **kwargs: op_instance.run(*args, **kwargs)

    def act(now: ForwardContext, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        before = count_of([(a, min(b, options["start"])) for a, b in now.own(need) if a < options["start"]])
        return x.narrow(need.dim, before, now.count(op_instance.choice.gives[0]))

    return act


def _sum(op_instance: OpInstance) -> Act:
    """A summand of a sum or mean along the dim that is cut."""
    options = op_instance.layer.options

    def act(now: ForwardContext, x: torch.Tensor, *_: Any, **given: Any) -> torch.Tensor:
        if options["name"] == "sum":
            return x.sum(options["dims"], keepdim=options["keep"], dtype=given.get("dtype"))
        shape = now.full_shape(x, op_instance.choice.needs[0])
        kind: torch.dtype = given.get("dtype") or x.dtype
        wide = torch.float32 if kind.itemsize < 4 else kind  # a sum of 16-bit numbers may be too large for one
        total: torch.Tensor = x.sum(options["dims"], keepdim=options["keep"], dtype=wide)
        mean: torch.Tensor = (total / prod(shape[dim] for dim in options["dims"])).to(kind)
        return mean

    return act


def _group_conv(op_instance: OpInstance) -> Act:
    groups = op_instance.layer.options["groups"]

    def act(now: ForwardContext, x: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        here = groups * now.count(op_instance.choice.needs[0]) // now.size(op_instance.choice.needs[0])
        if len(args) > 4:
            return op_instance.run(x, weight, *args[:4], here, *args[5:], **kwargs)  # type: ignore[no-any-return]
        return op_instance.run(x, weight, *args, **{**kwargs, "groups": here})  # type: ignore[no-any-return]

    return act


def _group_norm(op_instance: OpInstance) -> Act:
    def act(
        now: ForwardContext,
        x: torch.Tensor,
        groups: int,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> Any:
        need = op_instance.choice.needs[0]
        if op_instance.choice.mode == "local":
            return F.group_norm(x, groups * now.count(need) // now.size(need), weight, bias, eps)
        channels = now.size(need)
        return ops.group_norm(
            x, groups, weight, bias, eps, channels=channels, segments=now.own(need), shard_group=now.shard_group
        )

    return act


def _layer_norm(op_instance: OpInstance) -> Act:
    def act(
        now: ForwardContext,
        x: torch.Tensor,
        shape: Any,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> Any:
        return ops.layer_norm(x, weight, bias, now.size(op_instance.choice.needs[0]), eps, now.shard_group)

    return act


def _rms_norm(op_instance: OpInstance) -> Act:
    def act(now: ForwardContext, x: torch.Tensor, _: Any, weight: Any = None, eps: float | None = None) -> Any:
        return ops.rms_norm(x, weight, now.size(op_instance.choice.needs[0]), eps, now.shard_group)

    return act


def _embedding_rows(op_instance: OpInstance) -> Act:
    need = op_instance.choice.needs[1]

    def act(
        now: ForwardContext, ids: torch.Tensor, weight: torch.Tensor, padding: int | None = None, *_: Any, **k: Any
    ) -> Any:
        return ops.embed_rows(ids, weight, now.own(need), now.size(need), k.get("padding_idx", padding))

    return act


def _vocabulary(op_instance: OpInstance) -> Act:
    def act(now: ForwardContext, logits: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        given = dict(zip(names, args, strict=False)) | kwargs
        return ops.cross_entropy(
            logits,
            target,
            now.own(op_instance.choice.needs[0]),
            now.shard_group,
            size=now.size(op_instance.choice.needs[0]),
            ignored=given.get("ignore_index", -100),
            reduction=given.get("reduction", "mean"),
        )

    return act


def _dropout(op_instance: OpInstance) -> Act:
    (need,) = op_instance.choice.needs
    module = (
        op_instance.model.get_submodule(str(op_instance.node.target)) if op_instance.node.op == "call_module" else None
    )

    def act(
        now: ForwardContext, x: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any
    ) -> torch.Tensor:
        if isinstance(module, Dropout):
            p, training = module.p, module.training
        if not training:
            return x
        key = now.dropout_stream.key(op_instance.number)
        shared = op_instance.layer.options["dims"]
        if need.state != "sharded":
            return drop(x, p, key, shared=shared)
        return drop(x, p, key, dim=need.dim, segments=now.own(need), full=now.size(need), shared=shared)

    return act


def _attention(op_instance: OpInstance) -> Act:
    """Torch's own attention, or with dropout one that draws by the place in the full tensor."""
    need = op_instance.choice.needs[0]

    def act(now: ForwardContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        names = ("attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        if not given.get("dropout_p"):
            return F.scaled_dot_product_attention(q, k, v, **given)
        if given.get("enable_gqa") and q.shape[-3] != k.shape[-3]:
            k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
        scores = (q * (given.get("scale") or q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)
        mask = given.get("attn_mask")
        if given.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
        key, shares = now.dropout_stream.key(op_instance.number), safe_softmax(scores)
        if need.state != "sharded":
            return drop(shares, given["dropout_p"], key) @ v
        own, full = now.own(need), now.size(need)
        return drop(shares, given["dropout_p"], key, dim=need.dim, segments=own, full=full) @ v

    return act


def _instance_norm(op_instance: OpInstance) -> Act:
    module: Any = op_instance.run  # its own forward would miss the channels of other ranks

    def act(now: ForwardContext, x: torch.Tensor) -> Any:
        own = module.training or not module.track_running_stats
        rate = module.momentum if module.momentum is not None else 0.0
        running = (module.running_mean, module.running_var)
        return F.instance_norm(x, *running, module.weight, module.bias, own, rate, module.eps)

    return act


def _batch_norm(op_instance: OpInstance) -> Act:
    module = op_instance.run
    held = [(name, need) for name, need in op_instance.needs.items() if name.endswith((".weight", ".bias"))]

    def act(now: ForwardContext, x: torch.Tensor) -> Any:
        if not isinstance(module, BatchNorm):
            return module(x)
        return ops.batch_norm(x, module, [now.values[key] for key in held], now.samples, now.shard_group)

    return act


LOCAL: dict[tuple[str, str], Callable[[OpInstance], Act]] = {
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
    ("attention", "*"): _attention,
}
