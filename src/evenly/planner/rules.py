"""What each operation can do with tensors that are cut: the states it needs, the states it gives.

One function a kind of operation; a new layer is one rule here. An operation always has the way of being computed whole,
from replicated tensors, on every rank.
"""

from collections.abc import Callable, Iterator

from evenly.planner import following
from evenly.planner.scene import Option, Scene, bystander, others
from evenly.spec.graph import Tensor
from evenly.spec.layout import COPIED, PARTIAL, REPLICATED, Record


def options_of(scene: Scene) -> Iterator[Option]:
    """Returns every way of computing a layer."""
    layer = scene.layer
    if layer.op in ("input", "parameter", "buffer", "constant", "number"):
        return
    whole = (REPLICATED,) * len(layer.outputs)
    yield Option("whole", (REPLICATED,) * len(layer.inputs), whole)
    rule = RULES.get(layer.op)
    if rule is not None and layer.inputs:
        yield from rule(scene)


def _pointwise(scene: Scene) -> Iterator[Option]:
    for record in scene.cut_dims(0) + scene.spread(0):
        yield Option("local", (record,), (record,))
    if scene.layer.options.get("linear") and scene.has("partial"):
        yield Option("summand", (PARTIAL,), (PARTIAL,))


def _along(scene: Scene) -> Iterator[Option]:
    yield from bystander(scene, [scene.layer.options["dim"]])


def _conv(scene: Scene) -> Iterator[Option]:
    groups, transposed = scene.layer.options["groups"], scene.layer.options["transposed"]
    out_dim, in_dim = (1, 0) if transposed else (0, 1)  # of the weight
    yield from bystander(scene, [1, *range(2, len(scene.inputs[0].shape))])
    out = scene.layer.outputs[0]
    if groups == 1:
        made = scene.own_cut(out, 1)
        yield Option("partitioned", (COPIED, Record("sharded", out_dim, made.cut)), (made,))
        for record in scene.sharded(0, 1):
            if not scene.rows(record):
                yield Option("reduced", (record, Record("sharded", in_dim, record.cut)), (PARTIAL,))
        return
    each_in, each_out = scene.inputs[0].shape[1] // groups, out.shape[1] // groups
    for record in scene.sharded(0, 1):
        per_group = scene.cuts.scaled(record.cut, 1, each_in)
        if per_group is None or scene.rows(record):
            continue
        made_cut, weight_cut = scene.cuts.scaled(per_group, each_out), record.cut
        if made_cut is None:
            continue
        weight = Record("sharded", 0, weight_cut if transposed else made_cut)
        yield Option("grouped", (record, weight), (Record("sharded", 1, made_cut),))


def _linear(scene: Scene) -> Iterator[Option]:
    last = len(scene.inputs[0].shape) - 1
    yield from bystander(scene, [last])
    made = scene.own_cut(scene.layer.outputs[0], last)
    yield Option("partitioned", (COPIED, Record("sharded", 0, made.cut)), (made,))
    for record in scene.sharded(0, last):
        if not scene.rows(record):
            yield Option("reduced", (record, Record("sharded", 1, record.cut)), (PARTIAL,))


def _embedding(scene: Scene) -> Iterator[Option]:
    for record in scene.cut_dims(0):
        yield Option("bystander", (record, COPIED), (record,))
    made = scene.own_cut(scene.layer.outputs[0], len(scene.layer.outputs[0].shape) - 1)
    yield Option("columns", (COPIED, Record("sharded", 1, made.cut)), (made,))
    for record in scene.sharded(1, 0):
        yield Option("rows", (COPIED, record), (PARTIAL,))


def _bias(scene: Scene) -> Iterator[Option]:
    dim = scene.layer.options["dim"]
    yield from bystander(scene, [dim])
    for record in scene.sharded(0, dim):
        if not scene.rows(record):
            yield Option("local", (record, Record("sharded", 0, record.cut)), (record,))


def _per_channel(scene: Scene) -> Iterator[Option]:
    """Every channel for itself; parameters and statistics are cut like the channels."""
    known = [r for r in (scene.states[1] or ()) if r.state == "sharded"] if len(scene.states) > 1 else []
    for record in dict.fromkeys([*scene.sharded(0, 1), *(Record("sharded", 1, r.cut) for r in known)]):
        if not scene.rows(record):
            own = Record("sharded", 0, record.cut)
            yield Option("local", others(scene, [record], own), (record,))


def _batch_norm(scene: Scene) -> Iterator[Option]:
    yield from _per_channel(scene)
    for record in scene.cut_dims(0):
        if scene.rows(record) and record.dim == 0:
            channels = scene.inputs[0].shape[1]
            kept = ("running_mean", "running_var")
            needs = tuple(REPLICATED if t.name.endswith(kept) else COPIED for t in scene.inputs[1:])
            yield Option("moments", (record, *needs), (record,), *_moments(scene, channels))


def _instance_norm(scene: Scene) -> Iterator[Option]:
    yield from _per_channel(scene)


def _group_norm(scene: Scene) -> Iterator[Option]:
    x, groups = scene.inputs[0], scene.layer.options["groups"]
    yield from bystander(scene, range(1, len(x.shape)))
    for record in scene.sharded(0, 1):
        if scene.rows(record):
            continue
        own = Record("sharded", 0, record.cut)
        whole_groups = scene.cuts.scaled(record.cut, 1, x.shape[1] // groups) is not None
        inside = (0, 0) if whole_groups else _moments(scene, x.shape[0] * groups)
        yield Option("local" if whole_groups else "moments", others(scene, [record], own), (record,), *inside)


def _moments(scene: Scene, rows: int, *, centred: bool = True) -> tuple[int, int]:
    """Returns the messages and elements of a mean and a variance of `rows` rows, and of their gradients."""
    forward = 2 if centred else 1
    if not scene.inputs[0].has_grad:
        return forward, forward * rows
    return forward + 1, 2 * forward * rows


def _layer_norm(scene: Scene) -> Iterator[Option]:
    x, first = scene.inputs[0], scene.layer.options["first"]
    yield from bystander(scene, range(first, len(x.shape)))
    if first != len(x.shape) - 1:
        return
    inside = _moments(scene, x.numel // x.shape[-1], centred=scene.layer.op == "layer_norm")
    for record in scene.sharded(0, first):
        if not scene.rows(record):
            own = Record("sharded", 0, record.cut)
            yield Option("moments", others(scene, [record], own), (record,), *inside)


def _spatial(scene: Scene) -> Iterator[Option]:
    yield from bystander(scene, range(scene.layer.options["first"], len(scene.inputs[0].shape)))
    if scene.layer.options["linear"] and scene.has("partial"):
        yield Option("summand", (PARTIAL,), (PARTIAL,))


def _prelu(scene: Scene) -> Iterator[Option]:
    if scene.inputs[1].numel == 1:
        yield from bystander(scene, [])
        return
    yield from bystander(scene, [1])
    yield from _per_channel(scene)


def _matmul(scene: Scene) -> Iterator[Option]:
    a, b = scene.inputs
    out = scene.layer.outputs[0]
    last = len(out.shape) - 1
    for record in scene.cut_dims(0):
        dim = record.dim + len(out.shape) - len(a.shape)
        if record.dim == len(a.shape) - 1:  # along what is summed
            for other in scene.sharded(1, len(b.shape) - 2):
                if other.cut == record.cut:
                    yield Option("reduced", (record, other), (PARTIAL,))
        elif dim == last - 1:
            yield Option("bystander", (record, COPIED), (Record("sharded", dim, record.cut),))
        else:
            own = dim - len(out.shape) + len(b.shape)
            has = own >= 0 and b.shape[own] == out.shape[dim]
            need = Record("sharded", own, record.cut) if has else COPIED
            yield Option("local", (record, need), (Record("sharded", dim, record.cut),))
    for record in scene.cut_dims(1):
        if record.dim == len(b.shape) - 1:
            yield Option("partitioned", (COPIED, record), (Record("sharded", last, record.cut),))
    if scene.states[1] is None and len(b.shape) == 2:  # x @ parameter
        made = scene.own_cut(out, last)
        yield Option("partitioned", (COPIED, Record("sharded", 1, made.cut)), (made,))
        for record in scene.sharded(0, len(a.shape) - 1):
            if not scene.rows(record):
                yield Option("reduced", (record, Record("sharded", 0, record.cut)), (PARTIAL,))


def _attention(scene: Scene) -> Iterator[Option]:
    query, key = scene.inputs[:2]
    heads = len(query.shape) - 3
    for record in scene.cut_dims(0):
        if record.dim > heads or (record.dim < heads and key.shape[record.dim] != query.shape[record.dim]):
            continue
        cut: int | None = record.cut
        if record.dim == heads and key.shape[heads] != query.shape[heads]:
            cut = scene.cuts.scaled(record.cut, key.shape[heads], query.shape[heads])
        if cut is None:
            continue
        pair = (Record("sharded", record.dim, cut),) * 2
        masks = tuple(_mask_need(tensor, query, record) for tensor in scene.inputs[3:])
        yield Option("local", (record, *pair, *masks), (record,))


def _mask_need(mask: Tensor, query: Tensor, record: Record) -> Record:
    own = record.dim - len(query.shape) + len(mask.shape)
    has = own >= 0 and mask.shape[own] == query.shape[record.dim]
    return Record("sharded", own, record.cut) if has else COPIED


def _cross_entropy(scene: Scene) -> Iterator[Option]:
    logits = scene.inputs[0]
    rows = logits.numel // logits.shape[1]
    for record in scene.cut_dims(0):
        if record.dim == 1:
            yield Option("vocabulary", (record, REPLICATED), (REPLICATED,), messages=2, sent=3 * rows)


RULES: dict[str, Callable[[Scene], Iterator[Option]]] = {
    "unary": _pointwise,
    "dropout": _pointwise,
    "along": _along,
    "conv": _conv,
    "linear": _linear,
    "embedding": _embedding,
    "bias": _bias,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _layer_norm,
    "spatial": _spatial,
    "prelu": _prelu,
    "join": following.join,
    "concat": following.concat,
    "view": following.view,
    "permute": following.permute,
    "split": following.split,
    "unbind": following.kept,
    "index": following.kept,
    "expand": following.kept,
    "narrow": following.narrow,
    "sum": following.summed,
    "repeat": following.repeat,
    "pixel_shuffle": following.pixel_shuffle,
    "matmul": _matmul,
    "attention": _attention,
    "cross_entropy": _cross_entropy,
}
