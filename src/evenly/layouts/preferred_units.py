"""The units in which each tensor should be cut: preferences of its consumers, passed back to its producer.

A preference only makes a layout cheaper: where it is not met, the consumer gathers.
"""

from math import gcd, lcm, prod

from evenly.layouts.cuts import Parts, matched, refined
from evenly.spec.graph import Graph, Layer, Tensor

PreferredUnits = dict[tuple[str, int], Parts]

SAME = {"unary", "dropout", "along", "bias", "prelu", "spatial", "batch_norm", "instance_norm", "layer_norm"}
SAME |= {"rms_norm", "roll"}


def preferred_units_of(graph: Graph) -> PreferredUnits:
    """Returns the parts, with their units, in which dims should be cut; dims of unit 1 are left out."""
    tensors, preferred = graph.tensors, PreferredUnits()
    for _ in range(2):  # the second pass lets the operands of a join agree
        for layer in reversed(graph.layers):
            if layer.outputs and layer.inputs:
                _pass_back(layer, tensors, preferred)
    return preferred


def parts_of(preferred: PreferredUnits, tensor: Tensor, dim: int) -> Parts:
    """Returns the parts of one dim; a single part of unit 1 if there is no preference."""
    return preferred.get((tensor.name, dim), ((tensor.shape[dim], 1),))


def channels_of(graph: Graph) -> dict[str, int]:
    """Returns the channel dim of each tensor, where the layers determine it."""
    tensors, channels = graph.tensors, dict[str, int]()
    for layer in graph.layers:
        if not layer.inputs or not layer.outputs:
            continue
        out = layer.outputs[0]
        x = tensors[layer.inputs[0]]
        dim: int | None = channels.get(x.name)
        if layer.op in ("conv", "batch_norm", "instance_norm", "group_norm"):
            dim = 1
        elif layer.op in ("linear", "embedding", "layer_norm", "rms_norm", "matmul", "recurrent"):
            dim = len(out.shape) - 1
        elif layer.op == "join":
            dims = [d - len(tensors[n].shape) for n in layer.inputs if (d := channels.get(n)) is not None]
            dim = len(out.shape) + max(dims) if dims else None
        elif dim is not None and layer.op == "permute":
            dim = layer.options["dims"].index(dim)
        elif dim is not None and layer.op == "view":
            dims_after = next((after for before, after in matched(x.shape, out.shape) or [] if dim in before), range(0))
            dim = next((d for d in dims_after if out.shape[d] > 1), None)
        elif dim is not None and layer.op in ("index", "unbind", "sum", "expand"):
            dim = kept_dims(layer, len(x.shape)).get(dim)
        for output in layer.outputs:
            if dim is not None and dim < len(output.shape):
                channels[output.name] = dim
    return channels


def _pass_back(layer: Layer, tensors: dict[str, Tensor], preferred: PreferredUnits) -> None:
    x, out = tensors[layer.inputs[0]], layer.outputs[0]
    if layer.op in SAME:
        for dim in range(min(len(x.shape), len(out.shape))):
            _prefer(preferred, x, dim, preferred.get((out.name, dim)))
    elif layer.op == "group_norm":
        _prefer(preferred, x, 1, preferred.get((out.name, 1)))
        _prefer(preferred, x, 1, ((x.shape[1], x.shape[1] // layer.options["groups"]),))
    elif layer.op == "conv" and layer.options["groups"] > 1:
        groups = layer.options["groups"]
        unit = _unit(preferred.get((out.name, 1)))
        groups_per_unit = lcm(unit, out.shape[1] // groups) // (out.shape[1] // groups)
        _prefer(preferred, x, 1, ((x.shape[1], groups_per_unit * x.shape[1] // groups),))
    elif layer.op == "join":
        _join(layer, tensors, preferred)
    elif layer.op == "attention":
        _heads([tensors[name] for name in layer.inputs[:3]], preferred)
    elif layer.op in ("view", "permute", "split", "unbind", "index", "expand", "narrow", "sum"):
        _reshape(layer, x, preferred)
    elif layer.op == "repeat":
        for dim in range(len(x.shape)):
            parts = preferred.get((out.name, dim))
            times = layer.options["times"] if dim == layer.options["dim"] else 1
            _prefer(preferred, x, dim, parts and tuple((size // times, max(1, unit // times)) for size, unit in parts))
        _prefer(preferred, out, layer.options["dim"], ((out.shape[layer.options["dim"]], layer.options["times"]),))
    elif layer.op == "pixel_shuffle":
        units = layer.options["units"]
        parts = preferred.get((out.name, 1), ((out.shape[1], 1),))
        _prefer(preferred, x, 1, tuple((size * units, unit * units) for size, unit in parts))
    elif layer.op == "concat":
        _concat(layer, tensors, preferred)


def _prefer(preferred: PreferredUnits, tensor: Tensor, dim: int, parts: Parts | None) -> None:
    if parts is None or dim >= len(tensor.shape) or sum(size for size, _ in parts) != tensor.shape[dim]:
        return
    if any(size % unit for size, unit in parts):
        return
    refined_parts = refined(preferred.get((tensor.name, dim)), parts)
    if refined_parts is not None:
        preferred[tensor.name, dim] = refined_parts


def _unit(parts: Parts | None) -> int:
    return lcm(*(unit for _, unit in parts)) if parts else 1


def _heads(queries_keys_values: list[Tensor], preferred: PreferredUnits) -> None:
    """Keeps heads whole; with fewer keys than queries, a key stays with all queries that use it."""
    query, key, _ = queries_keys_values
    dim = len(query.shape) - 3
    units = [max(1, query.shape[dim] // key.shape[dim]), 1, 1]
    for tensor, unit in zip(queries_keys_values, units, strict=True):
        _prefer(preferred, tensor, dim, ((tensor.shape[dim], unit),))
    if query.shape[dim] == key.shape[dim]:
        for other in queries_keys_values[1:]:
            _prefer(preferred, query, dim, preferred.get((other.name, dim)))
        for other in queries_keys_values[1:]:
            _prefer(preferred, other, dim, preferred.get((query.name, dim)))


def _join(layer: Layer, tensors: dict[str, Tensor], preferred: PreferredUnits) -> None:
    out = layer.outputs[0]
    for dim, size in enumerate(out.shape):
        aligned = []
        for name in layer.inputs:
            input_dim = dim - len(out.shape) + len(tensors[name].shape)
            if input_dim >= 0 and tensors[name].shape[input_dim] == size:
                aligned.append((tensors[name], input_dim))
        common_parts = preferred.get((out.name, dim))
        for tensor, input_dim in aligned:
            common_parts = refined(common_parts, preferred.get((tensor.name, input_dim)))
        for tensor, input_dim in aligned:
            _prefer(preferred, tensor, input_dim, common_parts)


def _concat(layer: Layer, tensors: dict[str, Tensor], preferred: PreferredUnits) -> None:
    out = layer.outputs[0]
    for dim in range(len(out.shape)):
        output_parts = preferred.get((out.name, dim))
        if output_parts is None:
            continue
        for name in layer.inputs:
            size = tensors[name].shape[dim]
            unit = _unit(output_parts)
            input_parts = output_parts if dim != layer.options["dim"] else ((size, unit if size % unit == 0 else 1),)
            _prefer(preferred, tensors[name], dim, input_parts)


def _reshape(layer: Layer, x: Tensor, preferred: PreferredUnits) -> None:
    out = layer.outputs[0]
    if layer.op == "view":
        _view(x, out, preferred)
    elif layer.op == "permute":
        for after, before in enumerate(layer.options["dims"]):
            _prefer(preferred, x, before, preferred.get((out.name, after)))
    elif layer.op == "split":
        chosen = layer.options["dim"]
        parts = [preferred.get((part.name, chosen), ((part.shape[chosen], 1),)) for part in layer.outputs]
        _prefer(preferred, x, chosen, tuple(item for part in parts for item in part))
        for dim in range(len(x.shape)):
            if dim != chosen:
                for part in layer.outputs:
                    _prefer(preferred, x, dim, preferred.get((part.name, dim)))
    else:
        for before, after in kept_dims(layer, len(x.shape)).items():
            for part in layer.outputs:
                if after < len(part.shape) and part.shape[after] == x.shape[before]:
                    _prefer(preferred, x, before, preferred.get((part.name, after)))


def _view(x: Tensor, out: Tensor, preferred: PreferredUnits) -> None:
    for before, after in matched(x.shape, out.shape) or []:
        for dim in after:
            output_parts = preferred.get((out.name, dim))
            if output_parts is None:
                continue
            outer = prod(out.shape[d] for d in after if d < dim)
            inner = prod(out.shape[d] for d in after if d > dim)
            flat = tuple((size * inner, unit * inner) for size, unit in output_parts) * outer
            wide = [d for d in before if x.shape[d] > 1]
            if not wide:
                continue
            tail = prod(x.shape[d] for d in before if d > wide[0])
            input_parts = tuple((size // tail, unit // gcd(unit, tail)) for size, unit in flat)
            if all(size % tail == 0 for size, _ in flat):
                _prefer(preferred, x, wide[0], input_parts)


def kept_dims(layer: Layer, ndim: int) -> dict[int, int]:
    """Returns the dims that an operation does not change: {dim before: dim after}."""
    options = layer.options
    match layer.op:
        case "index":
            return {before: after for before, after in enumerate(options["kept"]) if after >= 0}
        case "unbind":
            chosen = options["dim"]
            return {d: d - (d > chosen) for d in range(ndim) if d != chosen}
        case "sum":
            gone = set(options["dims"])
            keep = options["keep"]
            return {d: d if keep else d - sum(g < d for g in gone) for d in range(ndim) if d not in gone}
        case "expand":
            added = len(layer.outputs[0].shape) - ndim
            return {d: d + added for d in range(ndim)}
        case "narrow":
            return {d: d for d in range(ndim) if d != options["dim"]}
    return {}
