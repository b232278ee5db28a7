"""The floating-point work of an operation of a network."""

from evenly.spec.graph import Layer

POINTWISE = 12  # floating-point operations that count for moving one element through memory


def work_of(layer: Layer) -> float:
    """Returns the floating-point operations of forward and backward; moved elements count as work too."""
    return 3.0 * layer.flops + POINTWISE * sum(tensor.numel for tensor in layer.outputs)
