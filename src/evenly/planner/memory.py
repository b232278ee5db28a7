"""How much memory a rank needs: parameters, gradients, optimizer state, exchanges, and activations for backward."""

from dataclasses import dataclass

from evenly.planner.costs import GraphCosts
from evenly.spec.graph import Graph
from evenly.spec.layout import Layout, TensorPlacement

UNKNOWN = 1 << 40  # samples that fit into a device of unknown memory
COPIES = 4  # of every parameter: itself, its gradient, two slots of the optimizer


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one rank: `fixed_bytes` whatever the batch, and `sample_bytes` for each sample."""

    fixed_bytes: int
    sample_bytes: int

    def samples_in(self, free_bytes: int) -> int:
        """Returns the samples that fit; `free_bytes` of 0 means unknown, and everything fits."""
        if not free_bytes:
            return UNKNOWN
        return max(0, free_bytes - self.fixed_bytes) // max(1, self.sample_bytes)


def whole_need(graph_costs: GraphCosts, sample_bytes: int) -> MemoryNeed:
    """Returns the memory of a rank that holds the whole network."""
    return MemoryNeed(int((COPIES + graph_costs.exchange_copies) * graph_costs.parameter_bytes), sample_bytes)


def cut_needs(graph_costs: GraphCosts, layout: Layout, sample_bytes: int) -> list[MemoryNeed]:
    """Returns the memory of each member of a layout: its part of parameters and activations, and gathered tensors."""
    size = len(layout.members)
    fixed_bytes, activation_bytes, total_bytes = [0.0] * size, [0.0] * size, 0.0
    placements: dict[str, TensorPlacement] = {}
    tensors = graph_costs.graph.tensors
    for choice in layout.choices:
        layer = graph_costs.layers.get(choice.layer)
        if layer is None:
            continue
        for name, need in zip(layer.inputs, choice.needs, strict=False):
            placements.setdefault(name, need)
        if layer.kind != "reshaping":
            for tensor, placement in zip(layer.outputs, choice.gives, strict=False):
                total_bytes += tensor.size_bytes
                for member, part in enumerate(_parts(layout, placement)):
                    activation_bytes[member] += tensor.size_bytes * part
    for move in layout.moves:
        is_gathered = move.before.state == "sharded" and move.after.state != "sharded"
        if is_gathered and graph_costs.kinds.get(move.tensor) != "parameter":  # the full tensor is kept beside the part
            for member, part in enumerate(_parts(layout, move.before)):
                activation_bytes[member] += tensors[move.tensor].size_bytes * (1 - part)
    for layer in graph_costs.graph.layers:
        if layer.op == "parameter":
            parts = _parts(layout, placements.get(layer.name, TensorPlacement("replicated")))
            for member, part in enumerate(parts):
                copies = COPIES + graph_costs.exchange_copies
                fixed_bytes[member] += copies * tensors[layer.name].size_bytes * part
    scale = sample_bytes / total_bytes if total_bytes else 0.0
    return [MemoryNeed(int(a), int(b * scale)) for a, b in zip(fixed_bytes, activation_bytes, strict=True)]


def largest_layer(graph: Graph) -> str:
    """Returns the module with the largest parameter."""
    parameters = [layer for layer in graph.layers if layer.op == "parameter"]
    return max(parameters, key=lambda layer: layer.outputs[0].size_bytes).where if parameters else ""


def _parts(layout: Layout, placement: TensorPlacement) -> list[float]:
    if placement.state != "sharded":
        return [1.0] * len(layout.members)
    cut = layout.cuts[placement.cut]
    return [count / cut.size for count in cut.counts()]
