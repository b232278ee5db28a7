"""nn.Module -> Graph: layers, shapes, work, data flow, what may be cut and in what unit."""

from evenly.graph.lowering import name_of, path_of
from evenly.graph.own import refuse_strange_tensors
from evenly.graph.reads import OF_TORCH
from evenly.graph.trace import Example, Traced, follow, trace
from evenly.graph.watch import Change, ChangeWatch
from evenly.graph.while_tracing import refuse_hooks_on_all

__all__ = [
    "OF_TORCH",
    "Change",
    "ChangeWatch",
    "Example",
    "Traced",
    "follow",
    "name_of",
    "path_of",
    "refuse_hooks_on_all",
    "refuse_strange_tensors",
    "trace",
]
