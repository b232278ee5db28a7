"""What each operation can do with tensors that are cut: the states it needs, the states it gives.

One function a kind of operation; a new layer is one rule here. An operation always has the way of being computed whole,
from replicated tensors, on every rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from evenly.planner.cuts import Cuts
from evenly.planner.wishes import Wishes, kept_dims, parts_of
from evenly.spec.graph import Layer, Tensor
from evenly.spec.layout import COPIED, PARTIAL, REPLICATED, Record

State = frozenset[Record] | None  # the states in which a tensor is at hand; None: a parameter nobody has used yet


@dataclass(frozen=True)
class Option:
    """One way of computing a layer; `messages` and `sent` are collectives inside it and the elements they sum."""

    mode: str
    needs: tuple[Record, ...]
    gives: tuple[Record, ...]
    messages: int = 0
    sent: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether every rank computes everything."""
        return self.mode == "whole"


@dataclass(frozen=True)
class Scene:
    """One layer with its tensors and the states they are in."""

    layer: Layer
    inputs: tuple[Tensor, ...]
    states: tuple[State, ...]
    cuts: Cuts
    wishes: Wishes
    channels: dict[str, int]
    batches: Mapping[str, Record]  # how tensors would be cut along the batch, where that is allowed
    shares: Mapping[str, tuple[float, ...]]  # of tensors whose layer has its own

    def sharded(self, index: int, dim: int, *, batch: bool = False) -> list[Record]:
        """Returns the cuts along `dim` in which input `index` is at hand, and the one it could be brought to."""
        found = [r for r in self.states[index] or () if r.state == "sharded" and r.dim == dim]
        if batch or any(self.cuts.table[r.cut].rows for r in found):
            return found
        canonical = self.own_cut(self.inputs[index], dim)
        return found if canonical in found else [*found, canonical]

    def cut_dims(self, index: int) -> list[Record]:
        """Returns the cuts in which input `index` is at hand."""
        found = sorted(r for r in self.states[index] or () if r.state == "sharded")
        along = self.batches.get(self.inputs[index].name)
        whole = along is not None and not found and self.has("replicated", index)
        return [along] if whole and along is not None and self.layer.kind == "mixing" else found

    def own_cut(self, tensor: Tensor, dim: int) -> Record:
        """Returns the cut in which a tensor is made if nothing else decides."""
        shares = self.shares.get(tensor.name)
        return Record("sharded", dim, self.cuts.of_parts(parts_of(self.wishes, tensor, dim), shares))

    def spread(self, index: int) -> list[Record]:
        """Returns the cuts along its channels to which a tensor that is a sum can be brought."""
        dim = self.channels.get(self.inputs[index].name)
        return [self.own_cut(self.inputs[index], dim)] if dim is not None and self.has("partial", index) else []

    def rows(self, record: Record) -> int:
        """Returns the rows a sample of a cut along the batch; 0 for other cuts."""
        return self.cuts.table[record.cut].rows

    def has(self, state: str, index: int = 0) -> bool:
        """Whether input `index` is at hand in this state."""
        return any(r.state == state for r in self.states[index] or ())


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


def _others(scene: Scene, first: Sequence[Record], record: Record) -> tuple[Record, ...]:
    return tuple(first) + (record,) * (len(scene.layer.inputs) - len(first))


def _bystander(scene: Scene, touched: Sequence[int]) -> Iterator[Option]:
    """The input is cut along a dim that the operation treats like a batch: parameters are copied."""
    for record in scene.cut_dims(0):
        if record.dim not in touched:
            yield Option("bystander", _others(scene, [record], COPIED), (record,) * len(scene.layer.outputs))


def _pointwise(scene: Scene) -> Iterator[Option]:
    for record in scene.cut_dims(0) + scene.spread(0):
        yield Option("local", (record,), (record,))
    if scene.layer.options.get("linear") and scene.has("partial"):
        yield Option("summand", (PARTIAL,), (PARTIAL,))


def _along(scene: Scene) -> Iterator[Option]:
    yield from _bystander(scene, [scene.layer.options["dim"]])


def _conv(scene: Scene) -> Iterator[Option]:
    groups, transposed = scene.layer.options["groups"], scene.layer.options["transposed"]
    out_dim, in_dim = (1, 0) if transposed else (0, 1)  # of the weight
    yield from _bystander(scene, [1, *range(2, len(scene.inputs[0].shape))])
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
    yield from _bystander(scene, [last])
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
    yield from _bystander(scene, [dim])
    for record in scene.sharded(0, dim):
        if not scene.rows(record):
            yield Option("local", (record, Record("sharded", 0, record.cut)), (record,))


def _per_channel(scene: Scene) -> Iterator[Option]:
    """Every channel for itself; parameters and statistics are cut like the channels."""
    for record in scene.sharded(0, 1):
        if not scene.rows(record):
            own = Record("sharded", 0, record.cut)
            yield Option("local", _others(scene, [record], own), (record,))


def _batch_norm(scene: Scene) -> Iterator[Option]:
    yield from _per_channel(scene)
    for record in scene.cut_dims(0):
        if scene.rows(record) and record.dim == 0:
            channels = scene.inputs[0].shape[1]
            needs = tuple(COPIED if tensor.has_grad else REPLICATED for tensor in scene.inputs[1:])
            yield Option("moments", (record, *needs), (record,), *_moments(scene, channels))


def _instance_norm(scene: Scene) -> Iterator[Option]:
    yield from _per_channel(scene)


def _group_norm(scene: Scene) -> Iterator[Option]:
    x, groups = scene.inputs[0], scene.layer.options["groups"]
    yield from _bystander(scene, range(1, len(x.shape)))
    for record in scene.sharded(0, 1):
        if scene.rows(record):
            continue
        own = Record("sharded", 0, record.cut)
        whole_groups = scene.cuts.scaled(record.cut, 1, x.shape[1] // groups) is not None
        inside = (0, 0) if whole_groups else _moments(scene, x.shape[0] * groups)
        yield Option("local" if whole_groups else "moments", _others(scene, [record], own), (record,), *inside)


def _moments(scene: Scene, rows: int, *, centred: bool = True) -> tuple[int, int]:
    """Returns the messages and elements of a mean and a variance of `rows` rows, and of their gradients."""
    forward = 2 if centred else 1
    if not scene.inputs[0].has_grad:
        return forward, forward * rows
    return forward + 1, 2 * forward * rows


def _layer_norm(scene: Scene) -> Iterator[Option]:
    x, first = scene.inputs[0], scene.layer.options["first"]
    yield from _bystander(scene, range(first, len(x.shape)))
    if first != len(x.shape) - 1:
        return
    inside = _moments(scene, x.numel // x.shape[-1], centred=scene.layer.op == "layer_norm")
    for record in scene.sharded(0, first):
        if not scene.rows(record):
            own = Record("sharded", 0, record.cut)
            yield Option("moments", _others(scene, [record], own), (record,), *inside)


def _spatial(scene: Scene) -> Iterator[Option]:
    yield from _bystander(scene, range(scene.layer.options["first"], len(scene.inputs[0].shape)))
    if scene.layer.options["linear"] and scene.has("partial"):
        yield Option("summand", (PARTIAL,), (PARTIAL,))


def _prelu(scene: Scene) -> Iterator[Option]:
    if scene.inputs[1].numel == 1:
        yield from _bystander(scene, [])
        return
    yield from _bystander(scene, [1])
    yield from _per_channel(scene)


def _join(scene: Scene) -> Iterator[Option]:
    out = scene.layer.outputs[0]
    seen: set[Record] = set()
    for index, tensor in enumerate(scene.inputs):
        for record in scene.cut_dims(index) + scene.spread(index):
            dim = record.dim + len(out.shape) - len(tensor.shape)
            made = Record("sharded", dim, record.cut)
            if out.shape[dim] == tensor.shape[record.dim] and made not in seen:
                seen.add(made)
                yield Option("local", _aligned(scene, made), (made,))
    same = all(tensor.shape == out.shape for tensor in scene.inputs)
    if scene.layer.options["linear"] and same and all(scene.has("partial", i) for i in range(len(scene.inputs))):
        yield Option("summand", (PARTIAL,) * len(scene.inputs), (PARTIAL,))


def _aligned(scene: Scene, made: Record) -> tuple[Record, ...]:
    """Returns what each operand must be: cut alike where it has the dim, copied where it is broadcast along it."""
    ndim = len(scene.layer.outputs[0].shape)
    size = scene.layer.outputs[0].shape[made.dim]
    needs = []
    for tensor in scene.inputs:
        own = made.dim - ndim + len(tensor.shape)
        has = own >= 0 and tensor.shape[own] == size
        needs.append(Record("sharded", own, made.cut) if has else COPIED)
    return tuple(needs)


def _concat(scene: Scene) -> Iterator[Option]:
    dim, count = scene.layer.options["dim"], len(scene.inputs)
    here = [next(iter([r for r in scene.cut_dims(i) if r.dim == dim]), None) for i in range(count)]
    if any(record is not None for record in here):
        needs = [record or scene.own_cut(scene.inputs[i], dim) for i, record in enumerate(here)]
        joined = scene.cuts.joined([record.cut for record in needs])
        if joined is not None:
            yield Option("local", tuple(needs), (Record("sharded", dim, joined),))
    for record in {r for i in range(count) for r in scene.cut_dims(i) if r.dim != dim}:
        yield Option("local", (record,) * count, (record,))
    if all(scene.has("partial", i) for i in range(count)):
        yield Option("summand", (PARTIAL,) * count, (PARTIAL,))


def _view(scene: Scene) -> Iterator[Option]:
    x, out = scene.inputs[0], scene.layer.outputs[0]
    for record in scene.cut_dims(0):
        found = scene.cuts.viewed(x.shape, out.shape, record.dim, record.cut)
        if found is not None:
            yield Option("local", _others(scene, [record], COPIED), (Record("sharded", *found),))
    if scene.has("partial"):
        yield Option("summand", _others(scene, [PARTIAL], COPIED), (PARTIAL,))


def _permute(scene: Scene) -> Iterator[Option]:
    for record in scene.cut_dims(0):
        after = scene.layer.options["dims"].index(record.dim)
        yield Option("local", (record,), (Record("sharded", after, record.cut),))
    if scene.has("partial"):
        yield Option("summand", (PARTIAL,), (PARTIAL,))


def _split(scene: Scene) -> Iterator[Option]:
    dim, sizes = scene.layer.options["dim"], scene.layer.options["sizes"]
    for record in scene.cut_dims(0):
        if record.dim != dim:
            yield Option("local", (record,), (record,) * len(sizes))
            continue
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [scene.cuts.narrowed(record.cut, a, a + size) for a, size in zip(starts, sizes, strict=True)]
        if None not in parts:
            yield Option("local", (record,), tuple(Record("sharded", dim, part) for part in parts if part is not None))
    if scene.has("partial"):
        yield Option("summand", (PARTIAL,), (PARTIAL,) * len(sizes))


def _kept(scene: Scene) -> Iterator[Option]:
    """Dims that stay whole keep their cut."""
    dims = kept_dims(scene.layer, len(scene.inputs[0].shape))
    x, outs = scene.inputs[0], scene.layer.outputs
    for record in scene.cut_dims(0):
        after = dims.get(record.dim)
        if after is not None and outs[0].shape[after] == x.shape[record.dim]:
            made = Record("sharded", after, record.cut)
            yield Option("local", _others(scene, [record], COPIED), (made,) * len(outs))
    if scene.has("partial") and scene.layer.options.get("name", "sum") in ("sum", "mean"):
        yield Option("summand", _others(scene, [PARTIAL], COPIED), (PARTIAL,) * len(outs))


def _narrow(scene: Scene) -> Iterator[Option]:
    yield from _kept(scene)
    options = scene.layer.options
    for record in scene.cut_dims(0):
        if record.dim == options["dim"]:
            cut = scene.cuts.narrowed(record.cut, options["start"], options["stop"])
            if cut is not None:
                yield Option("local", (record,), (Record("sharded", record.dim, cut),))


def _sum(scene: Scene) -> Iterator[Option]:
    yield from _kept(scene)
    if scene.layer.options["name"] in ("sum", "mean"):
        for record in scene.cut_dims(0):
            if record.dim in scene.layer.options["dims"]:
                yield Option("reduced", (record,), (PARTIAL,))


def _repeat(scene: Scene) -> Iterator[Option]:
    dim, times = scene.layer.options["dim"], scene.layer.options["times"]
    for record in scene.cut_dims(0):
        cut = scene.cuts.scaled(record.cut, times) if record.dim == dim else record.cut
        if cut is not None and not (record.dim == dim and scene.rows(record)):
            yield Option("local", (record,), (Record("sharded", record.dim, cut),))


def _pixel_shuffle(scene: Scene) -> Iterator[Option]:
    for record in scene.cut_dims(0):
        cut = scene.cuts.scaled(record.cut, 1, scene.layer.options["units"]) if record.dim == 1 else record.cut
        if cut is not None and record.dim < 2:
            yield Option("local", (record,), (Record("sharded", record.dim, cut),))


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
        if record.dim > heads:
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
    "join": _join,
    "concat": _concat,
    "view": _view,
    "permute": _permute,
    "split": _split,
    "unbind": _kept,
    "index": _kept,
    "expand": _kept,
    "narrow": _narrow,
    "sum": _sum,
    "repeat": _repeat,
    "pixel_shuffle": _pixel_shuffle,
    "matmul": _matmul,
    "attention": _attention,
    "cross_entropy": _cross_entropy,
}
