"""What one rank does for an operation and mode, where that is not simply the operation itself on its parts."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from evenly._torch.modules import BatchNorm, Dropout
from evenly._torch.operators import safe_softmax
from evenly.comm import Shift, Wire, count_of
from evenly.graph import name_of
from evenly.shards import ops
from evenly.shards.chance import drop
from evenly.shards.mixing import layer_options, lowered, mixed
from evenly.shards.site import Pass, Site
from evenly.spec.layout import Move, Record, Segments

Act = Callable[..., Any]  # (now, *args, **kwargs) -> what the operation gives on this rank


def act_of(site: Site) -> Act:
    """Returns what this rank does at one operation."""
    made = LOCAL.get((site.layer.op, site.choice.mode)) or LOCAL.get((site.layer.op, "*"))
    if made is not None:
        return made(site)
    run = site.run
    return lambda now, *args, **kwargs: run(*args, **kwargs)


def layer_of(site: Site, entry: Move | None, wire: Wire) -> Callable[[Pass, Mapping[str, Record], Any], Any]:
    """Returns what this rank does at a convolution or linear layer, with its bias and the move of its input."""
    name = name_of(site.node)
    plain = act_of(site)
    cut = None
    if entry is not None:
        cut = entry.before if entry.before.state == "sharded" else entry.after

    def act(now: Pass, reads: Mapping[str, Record], bias: torch.Tensor | None) -> Any:
        args, kwargs = site.switched(lambda n: now.values[n.name, reads.get(n.name)])
        x, weight, rest = args[0], args[1] if len(args) > 1 else kwargs["weight"], args[3:]
        if site.is_idle(now):
            entered = Shift(wire, entry.name, cut.dim, _segments(now, cut))(lowered(x)) if entry and cut else x
            return site.idle(now, [entered, weight] if bias is None else [entered, weight, bias], reads)
        options = layer_options(name, rest, kwargs) if entry is not None else None
        if entry is not None and cut is not None and options is not None:
            return mixed(Shift(wire, entry.name, cut.dim, _segments(now, cut)), name, x, weight, bias, options)
        if entry is not None and cut is not None:
            x = Shift(wire, entry.name, cut.dim, _segments(now, cut))(lowered(x))
        kwargs = {key: value for key, value in kwargs.items() if key not in ("weight", "bias", "input")}
        return plain(now, x, weight, bias, *rest, **kwargs)

    return act


def _segments(now: Pass, record: Record) -> tuple[Segments, ...]:
    return now.segments(record) if record.state == "sharded" else ()


def _view(site: Site) -> Act:
    """Sizes written into the network are full ones; the dim that is cut gets this rank's size."""
    (given,) = site.choice.gives
    shapes: dict[Any, tuple[int, ...]] = {}
    expands = site.layer.op == "expand"

    def act(now: Pass, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        key = (now.samples, x.shape, *(a.shape if isinstance(a, torch.Tensor) else a for a in args))
        if key not in shapes:
            shapes[key] = tuple(site.full_output(now).shape)
        shape = list(shapes[key])
        shape[given.dim] = now.count(given)
        return x.expand(shape) if expands else x.reshape(shape)

    return act


def _split(site: Site) -> Act:
    dim = site.layer.options["dim"]
    if site.choice.needs[0].dim != dim:
        return lambda now, *args, **kwargs: site.run(*args, **kwargs)
    return lambda now, x, *_, **__: torch.split(x, [now.count(record) for record in site.choice.gives], dim)


def _narrow(site: Site) -> Act:
    (need,) = site.choice.needs
    options = site.layer.options
    if need.dim != options["dim"]:
        return lambda now, *args, **kwargs: site.run(*args, **kwargs)

    def act(now: Pass, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        before = count_of([(a, min(b, options["start"])) for a, b in now.own(need) if a < options["start"]])
        return x.narrow(need.dim, before, now.count(site.choice.gives[0]))

    return act


def _sum(site: Site) -> Act:
    """A summand of a sum or mean along the dim that is cut."""
    options = site.layer.options

    def act(now: Pass, x: torch.Tensor, *_: Any, **given: Any) -> torch.Tensor:
        if options["name"] == "sum":
            return x.sum(options["dims"], keepdim=options["keep"], dtype=given.get("dtype"))
        shape = now.full_shape(x, site.choice.needs[0])
        kind: torch.dtype = given.get("dtype") or x.dtype
        wide = torch.float32 if kind.itemsize < 4 else kind  # a sum of 16-bit numbers may be too large for one
        total: torch.Tensor = x.sum(options["dims"], keepdim=options["keep"], dtype=wide)
        mean: torch.Tensor = (total / prod(shape[dim] for dim in options["dims"])).to(kind)
        return mean

    return act


def _group_conv(site: Site) -> Act:
    groups = site.layer.options["groups"]

    def act(now: Pass, x: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        here = groups * now.count(site.choice.needs[0]) // now.size(site.choice.needs[0])
        if len(args) > 4:
            return site.run(x, weight, *args[:4], here, *args[5:], **kwargs)  # type: ignore[no-any-return]
        return site.run(x, weight, *args, **{**kwargs, "groups": here})  # type: ignore[no-any-return]

    return act


def _group_norm(site: Site) -> Act:
    def act(
        now: Pass, x: torch.Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> Any:
        need = site.choice.needs[0]
        if site.choice.mode == "local":
            return F.group_norm(x, groups * now.count(need) // now.size(need), weight, bias, eps)
        channels = now.size(need)
        return ops.group_norm(x, groups, weight, bias, eps, channels=channels, segments=now.own(need), wire=now.wire)

    return act


def _layer_norm(site: Site) -> Act:
    def act(
        now: Pass, x: torch.Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> Any:
        return ops.layer_norm(x, weight, bias, now.size(site.choice.needs[0]), eps, now.wire)

    return act


def _rms_norm(site: Site) -> Act:
    def act(now: Pass, x: torch.Tensor, _: Any, weight: Any = None, eps: float | None = None) -> Any:
        return ops.rms_norm(x, weight, now.size(site.choice.needs[0]), eps, now.wire)

    return act


def _embedding_rows(site: Site) -> Act:
    need = site.choice.needs[1]

    def act(now: Pass, ids: torch.Tensor, weight: torch.Tensor, padding: int | None = None, *_: Any, **k: Any) -> Any:
        return ops.embed_rows(ids, weight, now.own(need), now.size(need), k.get("padding_idx", padding))

    return act


def _vocabulary(site: Site) -> Act:
    def act(now: Pass, logits: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        given = dict(zip(names, args, strict=False)) | kwargs
        return ops.cross_entropy(
            logits,
            target,
            now.own(site.choice.needs[0]),
            now.wire,
            size=now.size(site.choice.needs[0]),
            ignored=given.get("ignore_index", -100),
            reduction=given.get("reduction", "mean"),
        )

    return act


def _dropout(site: Site) -> Act:
    (need,) = site.choice.needs
    module = site.model.get_submodule(str(site.node.target)) if site.node.op == "call_module" else None

    def act(now: Pass, x: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> torch.Tensor:
        if isinstance(module, Dropout):
            p, training = module.p, module.training
        if not training:
            return x
        key = now.dice.key(site.number)
        shared = site.layer.options["dims"]
        if need.state != "sharded":
            return drop(x, p, key, shared=shared)
        return drop(x, p, key, dim=need.dim, segments=now.own(need), full=now.size(need), shared=shared)

    return act


def _attention(site: Site) -> Act:
    """Torch's own attention, or with dropout one that draws by the place in the full tensor."""
    need = site.choice.needs[0]

    def act(now: Pass, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
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
        key, shares = now.dice.key(site.number), safe_softmax(scores)
        if need.state != "sharded":
            return drop(shares, given["dropout_p"], key) @ v
        own, full = now.own(need), now.size(need)
        return drop(shares, given["dropout_p"], key, dim=need.dim, segments=own, full=full) @ v

    return act


def _instance_norm(site: Site) -> Act:
    module: Any = site.run  # its own forward would miss the channels of other ranks

    def act(now: Pass, x: torch.Tensor) -> Any:
        own = module.training or not module.track_running_stats
        rate = module.momentum if module.momentum is not None else 0.0
        running = (module.running_mean, module.running_var)
        return F.instance_norm(x, *running, module.weight, module.bias, own, rate, module.eps)

    return act


def _batch_norm(site: Site) -> Act:
    module = site.run
    held = [(name, need) for name, need in site.needs.items() if name.endswith((".weight", ".bias"))]

    def act(now: Pass, x: torch.Tensor) -> Any:
        if not isinstance(module, BatchNorm):
            return module(x)
        return ops.batch_norm(x, module, [now.values[key] for key in held], now.samples, now.wire)

    return act


LOCAL: dict[tuple[str, str], Callable[[Site], Act]] = {
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
