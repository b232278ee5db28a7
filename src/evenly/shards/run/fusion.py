"""Which steps are done in one: a bias together with its layer, a move together with the layer it feeds."""

from collections import Counter

from evenly.graph import Traced
from evenly.spec.layout import COPIED, Layout, Move

LAYERS = ("conv", "linear")


def biases(traced: Traced, layout: Layout) -> dict[str, str]:
    """Returns for layers whose output goes only into a bias, in the same state, the operation that adds it."""
    layers = {layer.name: layer for layer in traced.graph.layers}
    choices = {choice.layer: choice for choice in layout.choices}
    uses = Counter(name for layer in traced.graph.layers for name in layer.inputs)
    found = {}
    for layer in traced.graph.layers:
        if layer.op != "bias" or uses[layer.inputs[0]] != 1:
            continue
        maker = layers.get(layer.inputs[0])
        if maker is None or maker.op not in LAYERS:
            continue
        if choices[maker.name].gives[0] == choices[layer.name].needs[0]:
            found[maker.name] = layer.name
    return found


def entries(traced: Traced, layout: Layout) -> dict[str, Move]:
    """Returns for partitioned layers the move that brings their input, where nobody else needs it moved."""
    layers = {layer.name: layer for layer in traced.graph.layers}
    moves = {(move.tensor, move.after): move for move in layout.moves}
    uses: Counter[str] = Counter()
    for choice in layout.choices:
        if layers[choice.layer].kind != "source":
            pairs = zip(layers[choice.layer].inputs, choice.needs, strict=True)
            uses.update(name for name, need in pairs if need == COPIED)
    found = {}
    for choice in layout.choices:
        layer = layers[choice.layer]
        if layer.op in LAYERS and choice.mode == "partitioned" and uses[layer.inputs[0]] == 1:
            move = moves.get((layer.inputs[0], COPIED))
            if move is not None and move.name in ("copy", "gather_for_ranks"):
                found[layer.name] = move
    return found
