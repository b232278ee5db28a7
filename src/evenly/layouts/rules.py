"""The options of each operation for cut tensors: the placements it needs and the placements it gives.

One function per kind of operation; a new layer is one rule here. Every operation can also be computed whole,
from replicated tensors, on every rank.
"""

from collections.abc import Callable, Iterator

from evenly.layouts import recurrent_units, shape_rules
from evenly.layouts.layer_context import LayerContext, LayerOption, bystander, others
from evenly.spec.graph import Tensor
from evenly.spec.layout import COPIED, PARTIAL, REPLICATED, TensorPlacement


def options_of(context: LayerContext) -> Iterator[LayerOption]:
    """Yields every option to compute a layer."""
    layer = context.layer
    if layer.op in ("input", "parameter", "buffer", "constant", "number"):
        return
    outputs = (REPLICATED,) * len(layer.outputs)
    yield LayerOption("whole", (REPLICATED,) * len(layer.inputs), outputs)
    rule = RULES.get(layer.op)
    if rule is not None and layer.inputs:
        yield from rule(context)


def _pointwise(context: LayerContext) -> Iterator[LayerOption]:
    for placement in context.cut_dims(0) + context.spread(0):
        yield LayerOption("local", (placement,), (placement,))
    if context.layer.options.get("linear") and context.has("partial"):
        yield LayerOption("summand", (PARTIAL,), (PARTIAL,))


def _along(context: LayerContext) -> Iterator[LayerOption]:
    yield from bystander(context, [context.layer.options["dim"]])


def _rolled(context: LayerContext) -> Iterator[LayerOption]:
    yield from bystander(context, context.layer.options["dims"])
    if context.has("partial"):
        yield LayerOption("summand", (PARTIAL,), (PARTIAL,))


def _conv(context: LayerContext) -> Iterator[LayerOption]:
    groups, transposed = context.layer.options["groups"], context.layer.options["transposed"]
    out_dim, in_dim = (1, 0) if transposed else (0, 1)  # of the weight
    yield from bystander(context, [1, *range(2, len(context.inputs[0].shape))])
    out = context.layer.outputs[0]
    if groups == 1:
        output_placement = context.output_cut(1, out_dim)
        yield LayerOption(
            "partitioned", (COPIED, TensorPlacement("sharded", out_dim, output_placement.cut)), (output_placement,)
        )
        for placement in context.sharded(0, 1):
            if not context.rows(placement):
                yield LayerOption("reduced", (placement, TensorPlacement("sharded", in_dim, placement.cut)), (PARTIAL,))
        return
    each_in, each_out = context.inputs[0].shape[1] // groups, out.shape[1] // groups
    for placement in context.sharded(0, 1):
        per_group = context.cuts.scaled(placement.cut, 1, each_in)
        if per_group is None or context.rows(placement):
            continue
        output_cut, weight_cut = context.cuts.scaled(per_group, each_out), placement.cut
        if output_cut is None:
            continue
        weight = TensorPlacement("sharded", 0, weight_cut if transposed else output_cut)
        yield LayerOption("grouped", (placement, weight), (TensorPlacement("sharded", 1, output_cut),))


def _linear(context: LayerContext) -> Iterator[LayerOption]:
    last = len(context.inputs[0].shape) - 1
    yield from bystander(context, [last])
    output_placement = context.output_cut(last, 0)
    yield LayerOption("partitioned", (COPIED, TensorPlacement("sharded", 0, output_placement.cut)), (output_placement,))
    for placement in context.sharded(0, last):
        if not context.rows(placement):
            yield LayerOption("reduced", (placement, TensorPlacement("sharded", 1, placement.cut)), (PARTIAL,))


def _embedding(context: LayerContext) -> Iterator[LayerOption]:
    for placement in context.cut_dims(0):
        yield LayerOption("bystander", (placement, COPIED), (placement,))
    output_placement = context.output_cut(len(context.layer.outputs[0].shape) - 1, 1)
    yield LayerOption("columns", (COPIED, TensorPlacement("sharded", 1, output_placement.cut)), (output_placement,))
    for placement in context.sharded(1, 0):
        yield LayerOption("rows", (COPIED, placement), (PARTIAL,))


def _bias(context: LayerContext) -> Iterator[LayerOption]:
    dim = context.layer.options["dim"]
    yield from bystander(context, [dim])
    for placement in context.sharded(0, dim):
        if not context.rows(placement):
            yield LayerOption("local", (placement, TensorPlacement("sharded", 0, placement.cut)), (placement,))


def _per_channel(context: LayerContext) -> Iterator[LayerOption]:
    """Yields options for operations on single channels; parameters and statistics are cut like the channels."""
    parameter_placements = (
        [r for r in (context.states[1] or ()) if r.state == "sharded"] if len(context.states) > 1 else []
    )
    for placement in dict.fromkeys(
        [*context.sharded(0, 1), *(TensorPlacement("sharded", 1, r.cut) for r in parameter_placements)]
    ):
        if not context.rows(placement):
            parameter_placement = TensorPlacement("sharded", 0, placement.cut)
            yield LayerOption("local", others(context, [placement], parameter_placement), (placement,))


def _batch_norm(context: LayerContext) -> Iterator[LayerOption]:
    yield from _per_channel(context)
    for placement in context.cut_dims(0):
        if context.rows(placement) and placement.dim == 0:
            channels = context.inputs[0].shape[1]
            statistics = context.layer.options.get("statistics", ())
            needs = tuple(
                REPLICATED if i in statistics or t.name.endswith((".running_mean", ".running_var")) else COPIED
                for i, t in enumerate(context.inputs[1:], start=1)
            )
            yield LayerOption("moments", (placement, *needs), (placement,), *_moments(context, channels))


def _assign(context: LayerContext) -> Iterator[LayerOption]:
    """Yields the options of writing into a buffer: the buffer is cut like what is written."""
    if context.inputs[0].shape != context.inputs[1].shape:
        return
    for placement in context.cut_dims(1):
        if not context.rows(placement):
            yield LayerOption("local", (placement, placement), (placement,))


def _instance_norm(context: LayerContext) -> Iterator[LayerOption]:
    yield from _per_channel(context)


def _group_norm(context: LayerContext) -> Iterator[LayerOption]:
    x, groups = context.inputs[0], context.layer.options["groups"]
    yield from bystander(context, range(1, len(x.shape)))
    for placement in context.sharded(0, 1):
        if context.rows(placement):
            continue
        parameter_placement = TensorPlacement("sharded", 0, placement.cut)
        whole_groups = context.cuts.scaled(placement.cut, 1, x.shape[1] // groups) is not None
        inside = (0, 0) if whole_groups else _moments(context, x.shape[0] * groups)
        yield LayerOption(
            "local" if whole_groups else "moments",
            others(context, [placement], parameter_placement),
            (placement,),
            *inside,
        )


def _moments(context: LayerContext, rows: int, *, centred: bool = True) -> tuple[int, int]:
    """Returns the messages and elements of a mean and a variance of `rows` rows, and of their gradients."""
    forward = 2 if centred else 1
    if not context.inputs[0].has_grad:
        return forward, forward * rows
    return forward + 1, 2 * forward * rows


def _layer_norm(context: LayerContext) -> Iterator[LayerOption]:
    x, first = context.inputs[0], context.layer.options["first"]
    yield from bystander(context, range(first, len(x.shape)))
    if first != len(x.shape) - 1:
        return
    inside = _moments(context, x.numel // x.shape[-1], centred=context.layer.op == "layer_norm")
    for placement in context.sharded(0, first):
        if not context.rows(placement):
            parameter_placement = TensorPlacement("sharded", 0, placement.cut)
            yield LayerOption("moments", others(context, [placement], parameter_placement), (placement,), *inside)


def _spatial(context: LayerContext) -> Iterator[LayerOption]:
    yield from bystander(context, range(context.layer.options["first"], len(context.inputs[0].shape)))
    if context.layer.options["linear"] and context.has("partial"):
        yield LayerOption("summand", (PARTIAL,), (PARTIAL,))


def _prelu(context: LayerContext) -> Iterator[LayerOption]:
    if context.inputs[1].numel == 1:
        yield from bystander(context, [])
        return
    yield from bystander(context, [1])
    yield from _per_channel(context)


def _matmul(context: LayerContext) -> Iterator[LayerOption]:
    a, b = context.inputs
    out = context.layer.outputs[0]
    last = len(out.shape) - 1
    for placement in context.cut_dims(0):
        dim = placement.dim + len(out.shape) - len(a.shape)
        if placement.dim == len(a.shape) - 1:  # along the summed dim
            for other in context.sharded(1, len(b.shape) - 2):
                if other.cut == placement.cut:
                    yield LayerOption("reduced", (placement, other), (PARTIAL,))
        elif dim == last - 1:
            yield LayerOption("bystander", (placement, COPIED), (TensorPlacement("sharded", dim, placement.cut),))
        else:
            b_dim = dim - len(out.shape) + len(b.shape)
            has_dim = b_dim >= 0 and b.shape[b_dim] == out.shape[dim]
            need = TensorPlacement("sharded", b_dim, placement.cut) if has_dim else COPIED
            yield LayerOption("local", (placement, need), (TensorPlacement("sharded", dim, placement.cut),))
    for placement in context.cut_dims(1):
        if placement.dim == len(b.shape) - 1:
            yield LayerOption("partitioned", (COPIED, placement), (TensorPlacement("sharded", last, placement.cut),))
    if context.states[1] is None and len(b.shape) == 2:  # x @ parameter
        output_placement = context.output_cut(last, 1)
        yield LayerOption(
            "partitioned", (COPIED, TensorPlacement("sharded", 1, output_placement.cut)), (output_placement,)
        )
        for placement in context.sharded(0, len(a.shape) - 1):
            if not context.rows(placement):
                yield LayerOption("reduced", (placement, TensorPlacement("sharded", 0, placement.cut)), (PARTIAL,))


def _attention(context: LayerContext) -> Iterator[LayerOption]:
    query, key = context.inputs[:2]
    heads = len(query.shape) - 3
    for placement in context.cut_dims(0):
        if placement.dim > heads or (placement.dim < heads and key.shape[placement.dim] != query.shape[placement.dim]):
            continue
        cut: int | None = placement.cut
        if placement.dim == heads and key.shape[heads] != query.shape[heads]:
            cut = context.cuts.scaled(placement.cut, key.shape[heads], query.shape[heads])
        if cut is None:
            continue
        pair = (TensorPlacement("sharded", placement.dim, cut),) * 2
        masks = tuple(_mask_need(tensor, query, placement) for tensor in context.inputs[3:])
        yield LayerOption("local", (placement, *pair, *masks), (placement,))


def _mask_need(mask: Tensor, query: Tensor, placement: TensorPlacement) -> TensorPlacement:
    mask_dim = placement.dim - len(query.shape) + len(mask.shape)
    has_dim = mask_dim >= 0 and mask.shape[mask_dim] == query.shape[placement.dim]
    return TensorPlacement("sharded", mask_dim, placement.cut) if has_dim else COPIED


def _recurrent(context: LayerContext) -> Iterator[LayerOption]:
    """Yields options that cut the batch, and one that cuts the units."""
    x, batch, num_states = context.inputs[0], context.layer.options["batch"], context.layer.options["states"]
    placements = [placement for placement in context.cut_dims(0) if placement.dim == batch]
    samples = context.batches.get(x.name)
    if not placements and samples is not None:  # where steps are dim 0 of the inputs, they count as samples
        placements = [samples if samples.dim == batch else context.own_cut(x, batch)]
    for placement in placements:
        state = TensorPlacement("sharded", 1, placement.cut)
        needs = others(context, [placement, *[state] * num_states], COPIED)
        yield LayerOption("bystander", needs, (placement, *[state] * (len(context.layer.outputs) - 1)))
    yield from recurrent_units.options_of(context)


def _cross_entropy(context: LayerContext) -> Iterator[LayerOption]:
    logits = context.inputs[0]
    rows = logits.numel // logits.shape[1]
    for placement in context.cut_dims(0):
        if placement.dim == 1:
            yield LayerOption("vocabulary", (placement, REPLICATED), (REPLICATED,), messages=2, summed=3 * rows)


RULES: dict[str, Callable[[LayerContext], Iterator[LayerOption]]] = {
    "unary": _pointwise,
    "dropout": _pointwise,
    "along": _along,
    "roll": _rolled,
    "conv": _conv,
    "linear": _linear,
    "embedding": _embedding,
    "bias": _bias,
    "assign": _assign,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _layer_norm,
    "spatial": _spatial,
    "prelu": _prelu,
    "join": shape_rules.join,
    "concat": shape_rules.concat,
    "view": shape_rules.view,
    "permute": shape_rules.permute,
    "split": shape_rules.split,
    "unbind": shape_rules.keep_dims,
    "index": shape_rules.keep_dims,
    "expand": shape_rules.keep_dims,
    "narrow": shape_rules.narrow,
    "sum": shape_rules.summed,
    "repeat": shape_rules.repeat,
    "pixel_shuffle": shape_rules.pixel_shuffle,
    "matmul": _matmul,
    "attention": _attention,
    "recurrent": _recurrent,
    "cross_entropy": _cross_entropy,
}
