"""The options of joining and reshaping operations for cut tensors: the cut follows its dim where it can."""

from collections.abc import Iterator

from evenly.layouts.cuts import matched
from evenly.layouts.layer_context import LayerContext, LayerOption, others
from evenly.layouts.preferred_units import kept_dims
from evenly.spec.layout import COPIED, PARTIAL, TensorPlacement


def join(context: LayerContext) -> Iterator[LayerOption]:
    """Yields options in which all operands are cut alike."""
    out = context.layer.outputs[0]
    yielded: set[TensorPlacement] = set()
    for index, tensor in enumerate(context.inputs):
        for placement in context.cut_dims(index) + context.spread(index):
            dim = placement.dim + len(out.shape) - len(tensor.shape)
            output_placement = TensorPlacement("sharded", dim, placement.cut)
            if dim >= 0 and out.shape[dim] == tensor.shape[placement.dim] and output_placement not in yielded:
                yielded.add(output_placement)
                yield LayerOption("local", _aligned(context, output_placement), (output_placement,))
    has_equal_shapes = all(tensor.shape == out.shape for tensor in context.inputs)
    are_partial = all(context.has("partial", i) for i in range(len(context.inputs)))
    if context.layer.options["linear"] and has_equal_shapes and are_partial:
        yield LayerOption("summand", (PARTIAL,) * len(context.inputs), (PARTIAL,))


def _aligned(context: LayerContext, output_placement: TensorPlacement) -> tuple[TensorPlacement, ...]:
    """Returns the placement of each operand: cut alike if it has the dim, copied if it is broadcast along it."""
    ndim = len(context.layer.outputs[0].shape)
    size = context.layer.outputs[0].shape[output_placement.dim]
    needs = []
    for tensor in context.inputs:
        input_dim = output_placement.dim - ndim + len(tensor.shape)
        has_dim = input_dim >= 0 and tensor.shape[input_dim] == size
        needs.append(TensorPlacement("sharded", input_dim, output_placement.cut) if has_dim else COPIED)
    return tuple(needs)


def concat(context: LayerContext) -> Iterator[LayerOption]:
    """Shards concatenate: their ranges join."""
    dim, count = context.layer.options["dim"], len(context.inputs)
    placements = [next(iter([r for r in context.cut_dims(i) if r.dim == dim]), None) for i in range(count)]
    if any(placement is not None for placement in placements):
        needs = [placement or context.own_cut(context.inputs[i], dim) for i, placement in enumerate(placements)]
        joined = context.cuts.joined([placement.cut for placement in needs])
        if joined is not None:
            yield LayerOption("local", tuple(needs), (TensorPlacement("sharded", dim, joined),))
    for placement in sorted({r for i in range(count) for r in context.cut_dims(i) if r.dim != dim}):
        yield LayerOption("local", (placement,) * count, (placement,))
    if all(context.has("partial", i) for i in range(count)):
        yield LayerOption("summand", (PARTIAL,) * count, (PARTIAL,))


def view(context: LayerContext) -> Iterator[LayerOption]:
    """The cut follows its dim into the new shape where it can."""
    x, out = context.inputs[0], context.layer.outputs[0]
    groups = matched(x.shape, out.shape) or []
    for placement in context.cut_dims(0):
        if placement.dim > 0 and any(0 in group and placement.dim in group for group, _ in groups):
            continue  # joined with the batch, whose size may change
        viewed = context.cuts.viewed(x.shape, out.shape, placement.dim, placement.cut)
        if viewed is not None:
            yield LayerOption("local", others(context, [placement], COPIED), (TensorPlacement("sharded", *viewed),))
    if context.has("partial"):
        yield LayerOption("summand", others(context, [PARTIAL], COPIED), (PARTIAL,))


def permute(context: LayerContext) -> Iterator[LayerOption]:
    """The cut moves with its dim."""
    for placement in context.cut_dims(0):
        after = context.layer.options["dims"].index(placement.dim)
        yield LayerOption("local", (placement,), (TensorPlacement("sharded", after, placement.cut),))
    if context.has("partial"):
        yield LayerOption("summand", (PARTIAL,), (PARTIAL,))


def split(context: LayerContext) -> Iterator[LayerOption]:
    """Every part takes its piece of the cut."""
    dim, sizes = context.layer.options["dim"], context.layer.options["sizes"]
    for placement in context.cut_dims(0):
        if placement.dim != dim:
            yield LayerOption("local", (placement,), (placement,) * len(sizes))
            continue
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [context.cuts.narrowed(placement.cut, a, a + size) for a, size in zip(starts, sizes, strict=True)]
        if None not in parts:
            yield LayerOption(
                "local",
                (placement,),
                tuple(TensorPlacement("sharded", dim, part) for part in parts if part is not None),
            )
    if context.has("partial"):
        yield LayerOption("summand", (PARTIAL,), (PARTIAL,) * len(sizes))


def keep_dims(context: LayerContext) -> Iterator[LayerOption]:
    """Dims that stay whole keep their cut."""
    dims = kept_dims(context.layer, len(context.inputs[0].shape))
    x, outs = context.inputs[0], context.layer.outputs
    for placement in context.cut_dims(0):
        after = dims.get(placement.dim)
        if after is not None and outs[0].shape[after] == x.shape[placement.dim]:
            output_placement = TensorPlacement("sharded", after, placement.cut)
            yield LayerOption("local", others(context, [placement], COPIED), (output_placement,) * len(outs))
    if context.has("partial") and context.layer.options.get("name", "sum") in ("sum", "mean"):
        yield LayerOption("summand", others(context, [PARTIAL], COPIED), (PARTIAL,) * len(outs))


def narrow(context: LayerContext) -> Iterator[LayerOption]:
    """A slice takes its piece of the cut."""
    yield from keep_dims(context)
    options = context.layer.options
    for placement in context.cut_dims(0):
        if placement.dim == options["dim"]:
            cut = context.cuts.narrowed(placement.cut, options["start"], options["stop"])
            if cut is not None:
                yield LayerOption("local", (placement,), (TensorPlacement("sharded", placement.dim, cut),))


def summed(context: LayerContext) -> Iterator[LayerOption]:
    """Sums along the dim that is cut are summands."""
    yield from keep_dims(context)
    if context.layer.options["name"] in ("sum", "mean"):
        for placement in context.cut_dims(0):
            if placement.dim in context.layer.options["dims"]:
                yield LayerOption("reduced", (placement,), (PARTIAL,))


def repeat(context: LayerContext) -> Iterator[LayerOption]:
    """Repeats along a dim: each index of it becomes `times` indices, and a cut of that dim is scaled."""
    dim, times = context.layer.options["dim"], context.layer.options["times"]
    for placement in context.cut_dims(0):
        cut = context.cuts.scaled(placement.cut, times) if placement.dim == dim else placement.cut
        if cut is not None and not (placement.dim == dim and context.rows(placement)):
            yield LayerOption("local", (placement,), (TensorPlacement("sharded", placement.dim, cut),))


def pixel_shuffle(context: LayerContext) -> Iterator[LayerOption]:
    """Several channels become one."""
    for placement in context.cut_dims(0):
        cut: int | None = placement.cut
        if placement.dim == 1:
            cut = context.cuts.scaled(placement.cut, 1, context.layer.options["units"])
        if cut is not None and placement.dim < 2:
            yield LayerOption("local", (placement,), (TensorPlacement("sharded", placement.dim, cut),))
