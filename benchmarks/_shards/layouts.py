"""The layouts that `shards.py` compares: ours, the published one and an even split."""

from collections.abc import Sequence

from evenly.layouts import lay_out
from evenly.spec import Graph, Layer, Layout

FOLLOWING_OPS = ("bias", "batch_norm", "unary", "spatial", "view")  # each follows the layer that feeds it
Modes = dict[str, tuple[str, ...]]  # layer name to the modes that a layout may choose


def compared_layouts(graph: Graph, shares: Sequence[float]) -> dict[str, Layout]:
    """Returns the layouts of a network with these shares, by the name of the row."""
    widths = {layer.where: layer.outputs[0].shape[1] for layer in graph.layers if layer.op in ("conv", "linear")}
    rounded_shares = {where: published_rounding(width, shares) for where, width in widths.items()}
    modes = alternating_modes(graph)
    return {
        "even": lay_out(graph, [1] * len(shares), modes=modes),
        "published": lay_out(graph, shares, layer_shares=rounded_shares, modes=modes),
        "ours, filters": lay_out(graph, shares),
        "ours": lay_out(graph, shares, cut_batch=True),
        "ours, without the slowest": lay_out(graph, [*shares[:-1], 0], cut_batch=True),
    }


def published_rounding(filters: int, shares: Sequence[float]) -> list[int]:
    """Returns whole filters: every share rounded, what is missing or too much goes to the fastest device."""
    counts = [round(filters * share / sum(shares)) for share in shares]
    fastest = max(range(len(shares)), key=lambda rank: shares[rank])
    counts[fastest] += filters - sum(counts)
    return counts


def alternating_modes(graph: Graph) -> Modes:
    """Returns the modes of plain alternation: partitioned, reduced, ...; blocks begin and end replicated."""
    producers = {tensor.name: layer for layer in graph.layers for tensor in layer.outputs}
    modes: Modes = {}
    layers_of_block: dict[str, int] = {}
    for layer in graph.layers:
        if layer.op in ("conv", "linear"):
            block = layer.where.rsplit(".", 1)[0] if "layer" in layer.where else ""
            number = 0 if "downsample" in layer.where else layers_of_block.get(block, 0)
            layers_of_block[block] = number + 1
            modes[layer.name] = ("reduced",) if number % 2 else ("partitioned",)
        elif layer.op == "join":
            modes[layer.name] = ("whole",)
        elif layer.op in FOLLOWING_OPS and layer.inputs:
            source = _source_layer(layer, producers)
            if modes.get(source.name) == ("reduced",):
                modes[layer.name] = ("whole",)
    return modes


def _source_layer(layer: Layer, producers: dict[str, Layer]) -> Layer:
    """Returns the nearest layer before this one that does not itself follow another."""
    source = producers[layer.inputs[0]]
    while source.op in FOLLOWING_OPS:
        source = producers[source.inputs[0]]
    return source
