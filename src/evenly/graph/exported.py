"""Networks traced by torch.export, for those whose forward fx cannot trace."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.fx.node import Argument
from torch.nn import functional as F  # noqa: N812

from evenly._torch import pytree
from evenly._torch.modules import BatchNorm
from evenly._torch.quiet_export import quiet_export
from evenly._torch.tracing import constant_name, is_guard, output_spec
from evenly.errors import SpecError
from evenly.graph.decisions import Condition, Decisions
from evenly.graph.reads import MODULE_ATTRIBUTES


def exported(model: nn.Module, example_inputs: dict[str, torch.Tensor]) -> tuple[fx.GraphModule, Decisions]:
    """Returns the exported network as a plain graph with a dynamic batch, and the conditions on the batch size."""
    shapes = {name: {0: Dim.AUTO} if tensor.ndim else None for name, tensor in example_inputs.items()}
    with quiet_export():  # our error has the reason
        program = export(model, (), kwargs=example_inputs, dynamic_shapes=shapes, strict=False)
    decisions = Decisions(conditions=_open_batch(program, list(example_inputs)))
    module = program.module()
    graph: fx.Graph = module.graph
    _name_constants(model, module)
    spec = output_spec(graph)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not isinstance(operator.attrgetter(str(node.target))(module), torch.Tensor):
            raise SpecError("forward switches gradients or autocast on or off; move that into a module of its own")
        if node.op == "call_module" and is_guard(str(node.target)):
            graph.erase_node(node)
        elif node.op == "output":
            node.args = (pytree.tree_unflatten(list(node.args[0]), spec),)
        elif node.target is torch.ops.aten.embedding.default:
            weight, ids, *rest = node.args
            node.target, node.args = F.embedding, (ids, weight, *rest[:1])
        elif node.target is torch.ops.aten.slice.Tensor:
            _slice_to_getitem(node)
    for path, submodule in model.named_modules():
        if isinstance(submodule, BatchNorm) and submodule.track_running_stats:
            _restore_batch_norm(path, submodule, module)
    for node in graph.nodes:
        if node.target is torch.ops.aten.batch_norm.default:
            x, weight, bias, mean, variance, *rest = node.args
            node.target, node.args = F.batch_norm, (x, mean, variance, weight, bias, *rest[:3])
    graph.set_codegen(fx.graph.CodeGen())
    graph.lint()
    return fx.GraphModule(module, graph), decisions


def _open_batch(program: ExportedProgram, names: list[str]) -> list[Condition]:
    """Returns the conditions on batch sizes, with the symbols of the inputs' sizes; raises where one size is fixed."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = [values.get(str(name)) for name in program.graph_signature.user_inputs]
    fixed = [x for x in inputs if isinstance(x, torch.Tensor) and x.ndim and is_concrete_int(x.shape[0])]
    bounds = [(int(r.lower), r.upper) for r in program.range_constraints.values()]
    if fixed or any(lower > 2 or upper < 2**40 for lower, upper in bounds):
        raise SpecError("forward takes other branches for other batch sizes")
    batches: dict[str, Any] = {  # symbolic sizes
        name: x.shape[0] for name, x in zip(names, inputs, strict=True) if isinstance(x, torch.Tensor) and x.ndim
    }
    symbols = {name: size.node.expr for name, size in batches.items()}
    guards = next(iter(batches.values())).node.shape_env.guards if batches else []
    return [Condition(True, symbols), *(Condition(guard.expr, symbols) for guard in guards if guard.expr.free_symbols)]


def _name_constants(model: nn.Module, module: fx.GraphModule) -> None:
    """Gives tensors created in forward the names that fx gives to constants; refuses unregistered tensors."""
    names: dict[str, str] = {}
    unregistered_storages = {
        x.untyped_storage().data_ptr()
        for submodule in model.modules()
        for x in _unregistered_tensors(_attributes(submodule), 0)
    }
    for node in module.graph.nodes:
        target = str(node.target)
        if node.op == "get_attr" and target.startswith("lifted_tensor"):
            value = getattr(module, target)
            if value.untyped_storage().data_ptr() in unregistered_storages:
                raise SpecError(
                    f"forward uses a tensor of shape {list(value.shape)}, an attribute of the network that is neither "
                    "a parameter nor a buffer; use register_buffer, or nn.ModuleList in place of a plain list of layers"
                )
            names.setdefault(target, constant_name(len(names)))
            setattr(module, names[target], value)
            node.target = names[target]


def _attributes(module: nn.Module) -> list[object]:
    return [value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES]


def _unregistered_tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    """Yields the tensors in attributes that are neither parameters nor buffers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module) and depth:  # a module that is not registered either
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, list | tuple | set | dict) and depth < 3:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _unregistered_tensors(item, depth + 1)


def _restore_batch_norm(path: str, norm: nn.Module, module: fx.GraphModule) -> None:
    """Replaces the exported operations of a BatchNorm by a call of the module, which also counts its batches."""
    nodes: list[fx.Node] = list(module.graph.nodes)
    attribute_nodes = {str(node.target): node for node in nodes if node.op == "get_attr"}
    mean, counter = (attribute_nodes.get(f"{path}.{name}") for name in ("running_mean", "num_batches_tracked"))
    norms = [node for node in nodes if node.target is torch.ops.aten.batch_norm.default and node.args[3] is mean]
    counts: list[fx.Node] = []  # the first adds to the counter, each later one to the result before
    for node in nodes:
        if node.target is torch.ops.aten.add_.Tensor and node.args == (counts[-1] if counts else counter, 1):
            counts.append(node)
    is_plain = len(counts) == (len(norms) if norm.training else 0) and not (counts and counts[-1].users)
    if mean is None or not norms or not is_plain:
        return
    for node in reversed(counts):
        module.graph.erase_node(node)
    module.set_submodule(path, norm)
    for node in norms:
        node.op = "call_module"
        node.target = path
        node.args = node.args[:1]


def _slice_to_getitem(node: fx.Node) -> None:
    arguments: list[Argument] = list(node.args)
    arguments += [0, None, None, 1][len(arguments) - 1 :]
    x, dim, start, stop, step = arguments
    if not isinstance(dim, int) or dim < 0:
        return
    is_open_ended = isinstance(stop, int) and stop >= 2**62
    index = (*[slice(None)] * dim, slice(start, None if is_open_ended else stop, step))
    node.target, node.args = operator.getitem, (x, index)
