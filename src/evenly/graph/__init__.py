"""nn.Module -> Graph: layers, shapes, work, data flow, what may be cut and in what unit."""

from evenly.graph.change_watch import Change, ChangeWatch
from evenly.graph.lowering import name_of, path_of
from evenly.graph.reads import MODULE_ATTRIBUTES
from evenly.graph.shapes import shape_of
from evenly.graph.torch_code import refuse_strange_tensors
from evenly.graph.trace import Example, Traced, trace, trace_module
from evenly.graph.tracing_guards import refuse_global_hooks

__all__ = [
    "MODULE_ATTRIBUTES",
    "Change",
    "ChangeWatch",
    "Example",
    "Traced",
    "name_of",
    "path_of",
    "refuse_global_hooks",
    "refuse_strange_tensors",
    "shape_of",
    "trace",
    "trace_module",
]
