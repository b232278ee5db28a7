"""The option that cuts recurrent layers by units: each rank computes all gates of its units, at every step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evenly.layouts.layer_context import LayerContext, LayerOption
from evenly.spec.graph import Layer, Tensor
from evenly.spec.layout import COPIED, TensorPlacement

GATES = {"LSTM": 4, "GRU": 3}  # blocks of rows in each weight; an RNN has one


@dataclass(frozen=True)
class RecurrentSizes:
    """The sizes of a recurrent operation."""

    steps: int
    samples: int
    units: int
    layers: int
    directions: int
    gates: int


def sizes_of(layer: Layer, inputs: Sequence[Tensor]) -> RecurrentSizes | None:
    """Returns the sizes of a recurrent operation; None if it cannot be cut by units, as one with projections."""
    y, hidden, *cells = layer.outputs
    weights = inputs[1 + layer.options["states"] :]
    gates = GATES.get(layer.options["name"], 1)
    num_rows, samples, units = hidden.shape
    is_projected = any(tensor.shape != hidden.shape for tensor in cells)
    if is_projected or not units or any(weight.shape[0] != gates * units for weight in weights):
        return None
    directions = y.shape[-1] // units
    return RecurrentSizes(
        y.shape[1 - layer.options["batch"]], samples, units, num_rows // directions, directions, gates
    )


def options_of(context: LayerContext) -> Iterator[LayerOption]:
    """Yields the option that cuts the units, if there is one."""
    layer, num_states = context.layer, context.layer.options["states"]
    sizes = sizes_of(layer, context.inputs)
    if sizes is None:
        return
    unit_cut = _unit_cut(context, sizes)
    weight_cut = context.cuts.joined([unit_cut] * sizes.gates)
    output_cut = context.cuts.joined([unit_cut] * sizes.directions)
    if weight_cut is None or output_cut is None:
        return
    state = TensorPlacement("sharded", 2, unit_cut)
    weight = TensorPlacement("sharded", 0, weight_cut)
    first_states = [COPIED, state][:num_states]  # of hidden states every rank needs all, of cells its own
    num_weights = len(context.inputs) - 1 - num_states
    needs = (COPIED, *first_states, *[weight] * num_weights)
    gives = (TensorPlacement("sharded", 2, output_cut), *[state] * (len(layer.outputs) - 1))
    messages = _messages(context, sizes)
    gathered = messages * sizes.directions * sizes.samples * sizes.units
    yield LayerOption("units", needs, gives, messages, gathered=gathered)


def _unit_cut(context: LayerContext, sizes: RecurrentSizes) -> int:
    """Returns how the units are cut: as the weights are already, or by the shares."""
    weight_states = context.states[1 + context.layer.options["states"]] or ()
    placements = sorted(r for r in weight_states if r.state == "sharded" and r.dim == 0)
    for placement in placements:
        unit_cut = context.cuts.narrowed(placement.cut, 0, sizes.units)
        if unit_cut is not None and context.cuts.joined([unit_cut] * sizes.gates) == placement.cut:
            return unit_cut
    tensor = context.layer.outputs[0 if sizes.directions == 1 else 1]
    return context.own_cut(tensor, 2).cut


def _messages(context: LayerContext, sizes: RecurrentSizes) -> int:
    """Returns how often states are gathered in forward, and their gradients summed in backward.

    The last state of the last layer is not gathered. A layer has a backward if its weights or what comes before it
    have gradients.
    """
    num_states = context.layer.options["states"]
    weights = context.inputs[1 + num_states :]
    has_biases = any(len(weight.shape) == 1 for weight in weights)
    weights_per_layer = sizes.directions * (4 if has_biases else 2)
    is_tied = len(weights) != sizes.layers * weights_per_layer  # a tensor that is used twice is listed once
    messages = 0
    has_grad = any(tensor.has_grad for tensor in (context.inputs if is_tied else context.inputs[: 1 + num_states]))
    for layer in range(sizes.layers):
        weights_of_layer = weights[layer * weights_per_layer : (layer + 1) * weights_per_layer]
        has_grad = has_grad or any(tensor.has_grad for tensor in weights_of_layer)
        gathers = sizes.steps - (layer == sizes.layers - 1)
        messages += gathers * (2 if has_grad else 1)
    return messages
