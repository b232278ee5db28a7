"""What joining and reshaping operations can do with tensors that are cut: the record follows its dim where it can."""

from collections.abc import Iterator

from evenly.layouts.cuts import matched
from evenly.layouts.layer_context import LayerContext, LayerOption, others
from evenly.layouts.preferred_units import kept_dims
from evenly.spec.layout import COPIED, PARTIAL, TensorPlacement


def join(context: LayerContext) -> Iterator[LayerOption]:
    """Operands are brought to one layout."""
    out = context.layer.outputs[0]
    seen: set[TensorPlacement] = set()
    for index, tensor in enumerate(context.inputs):
        for record in context.cut_dims(index) + context.spread(index):
            dim = record.dim + len(out.shape) - len(tensor.shape)
            made = TensorPlacement("sharded", dim, record.cut)
            if dim >= 0 and out.shape[dim] == tensor.shape[record.dim] and made not in seen:
                seen.add(made)
                yield LayerOption("local", _aligned(context, made), (made,))
    same = all(tensor.shape == out.shape for tensor in context.inputs)
    if context.layer.options["linear"] and same and all(context.has("partial", i) for i in range(len(context.inputs))):
        yield LayerOption("summand", (PARTIAL,) * len(context.inputs), (PARTIAL,))


def _aligned(context: LayerContext, made: TensorPlacement) -> tuple[TensorPlacement, ...]:
    """Returns what each operand must be: cut alike where it has the dim, copied where it is broadcast along it."""
    ndim = len(context.layer.outputs[0].shape)
    size = context.layer.outputs[0].shape[made.dim]
    needs = []
    for tensor in context.inputs:
        own = made.dim - ndim + len(tensor.shape)
        has = own >= 0 and tensor.shape[own] == size
        needs.append(TensorPlacement("sharded", own, made.cut) if has else COPIED)
    return tuple(needs)


def concat(context: LayerContext) -> Iterator[LayerOption]:
    """Shards concatenate: their ranges join."""
    dim, count = context.layer.options["dim"], len(context.inputs)
    here = [next(iter([r for r in context.cut_dims(i) if r.dim == dim]), None) for i in range(count)]
    if any(record is not None for record in here):
        needs = [record or context.own_cut(context.inputs[i], dim) for i, record in enumerate(here)]
        joined = context.cuts.joined([record.cut for record in needs])
        if joined is not None:
            yield LayerOption("local", tuple(needs), (TensorPlacement("sharded", dim, joined),))
    for record in sorted({r for i in range(count) for r in context.cut_dims(i) if r.dim != dim}):
        yield LayerOption("local", (record,) * count, (record,))
    if all(context.has("partial", i) for i in range(count)):
        yield LayerOption("summand", (PARTIAL,) * count, (PARTIAL,))


def view(context: LayerContext) -> Iterator[LayerOption]:
    """The cut follows its dim into the new shape where it can."""
    x, out = context.inputs[0], context.layer.outputs[0]
    groups = matched(x.shape, out.shape) or []
    for record in context.cut_dims(0):
        if record.dim > 0 and any(0 in group and record.dim in group for group, _ in groups):
            continue  # joined with the batch, whose size may change
        found = context.cuts.viewed(x.shape, out.shape, record.dim, record.cut)
        if found is not None:
            yield LayerOption("local", others(context, [record], COPIED), (TensorPlacement("sharded", *found),))
    if context.has("partial"):
        yield LayerOption("summand", others(context, [PARTIAL], COPIED), (PARTIAL,))


def permute(context: LayerContext) -> Iterator[LayerOption]:
    """The cut moves with its dim."""
    for record in context.cut_dims(0):
        after = context.layer.options["dims"].index(record.dim)
        yield LayerOption("local", (record,), (TensorPlacement("sharded", after, record.cut),))
    if context.has("partial"):
        yield LayerOption("summand", (PARTIAL,), (PARTIAL,))


def split(context: LayerContext) -> Iterator[LayerOption]:
    """Every part takes its piece of the cut."""
    dim, sizes = context.layer.options["dim"], context.layer.options["sizes"]
    for record in context.cut_dims(0):
        if record.dim != dim:
            yield LayerOption("local", (record,), (record,) * len(sizes))
            continue
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [context.cuts.narrowed(record.cut, a, a + size) for a, size in zip(starts, sizes, strict=True)]
        if None not in parts:
            yield LayerOption(
                "local", (record,), tuple(TensorPlacement("sharded", dim, part) for part in parts if part is not None)
            )
    if context.has("partial"):
        yield LayerOption("summand", (PARTIAL,), (PARTIAL,) * len(sizes))


def kept(context: LayerContext) -> Iterator[LayerOption]:
    """Dims that stay whole keep their cut."""
    dims = kept_dims(context.layer, len(context.inputs[0].shape))
    x, outs = context.inputs[0], context.layer.outputs
    for record in context.cut_dims(0):
        after = dims.get(record.dim)
        if after is not None and outs[0].shape[after] == x.shape[record.dim]:
            made = TensorPlacement("sharded", after, record.cut)
            yield LayerOption("local", others(context, [record], COPIED), (made,) * len(outs))
    if context.has("partial") and context.layer.options.get("name", "sum") in ("sum", "mean"):
        yield LayerOption("summand", others(context, [PARTIAL], COPIED), (PARTIAL,) * len(outs))


def narrow(context: LayerContext) -> Iterator[LayerOption]:
    """A slice takes its piece of the cut."""
    yield from kept(context)
    options = context.layer.options
    for record in context.cut_dims(0):
        if record.dim == options["dim"]:
            cut = context.cuts.narrowed(record.cut, options["start"], options["stop"])
            if cut is not None:
                yield LayerOption("local", (record,), (TensorPlacement("sharded", record.dim, cut),))


def summed(context: LayerContext) -> Iterator[LayerOption]:
    """Sums along the dim that is cut are summands."""
    yield from kept(context)
    if context.layer.options["name"] in ("sum", "mean"):
        for record in context.cut_dims(0):
            if record.dim in context.layer.options["dims"]:
                yield LayerOption("reduced", (record,), (PARTIAL,))


def repeat(context: LayerContext) -> Iterator[LayerOption]:
    """Every index becomes several."""
    dim, times = context.layer.options["dim"], context.layer.options["times"]
    for record in context.cut_dims(0):
        cut = context.cuts.scaled(record.cut, times) if record.dim == dim else record.cut
        if cut is not None and not (record.dim == dim and context.rows(record)):
            yield LayerOption("local", (record,), (TensorPlacement("sharded", record.dim, cut),))


def pixel_shuffle(context: LayerContext) -> Iterator[LayerOption]:
    """Several channels become one."""
    for record in context.cut_dims(0):
        cut = context.cuts.scaled(record.cut, 1, context.layer.options["units"]) if record.dim == 1 else record.cut
        if cut is not None and record.dim < 2:
            yield LayerOption("local", (record,), (TensorPlacement("sharded", record.dim, cut),))
