"""A network as torch.export sees it, for those whose own forward fx cannot follow."""

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree

from evenly._errors import SpecError


def exported(model: nn.Module, given: dict[str, torch.Tensor]) -> fx.GraphModule:
    """Returns the exported network as a plain graph: loops unrolled, branches decided, the batch left open."""
    shapes = {name: {0: Dim.AUTO} if tensor.ndim else None for name, tensor in given.items()}
    program = export(model, (), kwargs=given, dynamic_shapes=shapes, strict=False)
    _require_open_batch(program)
    module = program.module()
    graph: fx.Graph = module.graph
    form = graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]  # what export gives its graphs
    for node in list(graph.nodes):
        if node.op == "get_attr" and not isinstance(operator.attrgetter(str(node.target))(module), torch.Tensor):
            raise SpecError("forward switches gradients or autocast on or off; move that into a module of its own")
        if node.op == "call_module" and str(node.target).startswith("_guards"):
            graph.erase_node(node)
        elif node.op == "output":
            node.args = (pytree.tree_unflatten(list(node.args[0]), form),)
        elif node.target is torch.ops.aten.embedding.default:
            weight, ids, *rest = node.args
            node.target, node.args = F.embedding, (ids, weight, *rest[:1])
        elif node.target is torch.ops.aten.slice.Tensor:
            _spell_slice(node)
    graph.set_codegen(fx.graph.CodeGen())
    graph.lint()
    return fx.GraphModule(module, graph)


def _require_open_batch(program: ExportedProgram) -> None:
    """Raises where the network does other things for other batch sizes: export would keep to that of the example."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = [values.get(str(name)) for name in program.graph_signature.user_inputs]
    fixed = [x for x in inputs if isinstance(x, torch.Tensor) and x.ndim and isinstance(x.shape[0], int)]
    bounds = [(int(r.lower), r.upper) for r in program.range_constraints.values()]
    if fixed or any(lower > 2 or upper < 2**40 for lower, upper in bounds):
        raise SpecError("forward does other things for other batch sizes")


def _spell_slice(node: fx.Node) -> None:
    given: list[Any] = list(node.args)
    given += [0, None, None, 1][len(given) - 1 :]
    x, dim, start, stop, step = given
    if not isinstance(dim, int) or dim < 0:
        return
    whole = isinstance(stop, int) and stop >= 2**62
    chosen = (*[slice(None)] * dim, slice(start, None if whole else stop, step))
    node.target, node.args = operator.getitem, (x, chosen)
