"""nn.Module -> Graph: layers, shapes, work, who feeds whom, what may be cut and in what unit."""

from evenly.graph.lowering import name_of, path_of
from evenly.graph.trace import Example, Traced, follow, trace

__all__ = ["Example", "Traced", "follow", "name_of", "path_of", "trace"]
