"""Finds steps to fuse: a bias with its layer, a move with the layer that reads its result."""

from collections import Counter

from evenly.graph import Traced
from evenly.spec.layout import COPIED, Layout, Move

LAYERS = ("conv", "linear")


def biases(traced: Traced, layout: Layout) -> dict[str, str]:
    """Returns the operation that adds the bias, by layer; only where nothing else reads the layer's output."""
    layers = {layer.name: layer for layer in traced.graph.layers}
    choices = {choice.layer: choice for choice in layout.choices}
    uses = Counter(name for layer in traced.graph.layers for name in layer.inputs)
    bias_of_layer = {}
    for layer in traced.graph.layers:
        if layer.op != "bias" or uses[layer.inputs[0]] != 1:
            continue
        producer = layers.get(layer.inputs[0])
        if producer is None or producer.op not in LAYERS:
            continue
        if choices[producer.name].gives[0] == choices[layer.name].needs[0]:
            bias_of_layer[producer.name] = layer.name
    return bias_of_layer


def input_moves(traced: Traced, layout: Layout) -> dict[str, Move]:
    """Returns the move of the input, by partitioned layer; only where no other layer needs the moved tensor."""
    layers = {layer.name: layer for layer in traced.graph.layers}
    moves = {(move.tensor, move.after): move for move in layout.moves}
    uses: Counter[str] = Counter()
    for choice in layout.choices:
        if layers[choice.layer].kind != "source":
            pairs = zip(layers[choice.layer].inputs, choice.needs, strict=True)
            uses.update(name for name, need in pairs if need == COPIED)
    move_of_layer = {}
    for choice in layout.choices:
        layer = layers[choice.layer]
        if layer.op in LAYERS and choice.mode == "partitioned" and uses[layer.inputs[0]] == 1:
            move = moves.get((layer.inputs[0], COPIED))
            if move is not None and move.name in ("copy", "gather_for_ranks"):
                move_of_layer[layer.name] = move
    return move_of_layer
