"""How much work an operation of a network is."""

from evenly.spec.graph import Layer

POINTWISE = 12  # work of one element of an operation that only moves memory, in floating-point operations


def work_of(layer: Layer) -> float:
    """Returns the floating-point operations of forward and backward, those that only move memory included."""
    return 3.0 * layer.flops + POINTWISE * sum(tensor.numel for tensor in layer.outputs)
