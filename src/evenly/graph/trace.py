"""nn.Module -> Graph: layers, shapes, work, data flow, what may be cut."""

import inspect
import operator
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Argument

from evenly._torch import pytree
from evenly._torch.compiler import uncompiled
from evenly._torch.tracing import is_constant
from evenly.errors import SpecError
from evenly.graph.change_watch import ChangeWatch
from evenly.graph.decisions import Decisions
from evenly.graph.kinds import DRAWS, OpInputs, OpKind, opaque, row_of
from evenly.graph.lowering import lower, name_of, path_of
from evenly.graph.modes import Switches, mode_difference
from evenly.graph.reads import Reads
from evenly.graph.shapes import MetaValue, Shapes, shape_of
from evenly.graph.tracer import Opened, is_tensor_list, open_up
from evenly.spec.graph import Graph, Layer, Tensor

PLAIN = (
    int,
    float,
    complex,
    str,
    slice,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    range,
)
_TRACING = threading.Lock()  # fx patches torch's modules for the whole process while it traces
Example = torch.Tensor | tuple[object, ...] | list[Any] | Mapping[str, object]  # list[object] takes no list[Tensor]


@dataclass(frozen=True)
class Traced:
    """A network, the fx graph of its operations, and the same as a `Graph`."""

    model: nn.Module
    program: fx.GraphModule
    graph: Graph
    output_spec: pytree.TreeSpec | None  # of what forward returns; None: as the program returns it
    example: dict[str, tuple[int, ...]]  # shapes of the arguments that are tensors
    switches: Switches
    inputs: dict[str, torch.Tensor]  # the arguments that are tensors, on the meta device
    modes: dict[str, bool]  # `training` of each module before tracing
    reads: Reads  # what forward read while it was traced
    decisions: tuple[Decisions, ...]  # branches of forward that depend on sizes
    training_only: frozenset[str] = frozenset()  # operations that evaluation leaves out: they only change buffers
    evaluation: "Traced | None" = None  # the program of evaluation, if other operations compute its outputs


def trace(model: nn.Module, example: Example) -> Graph:
    """Returns the network's operations as a value: shapes, floating-point work, data flow, what may be cut.

    Args:
        model: the network; it is not changed.
        example: a batch as forward takes it: a tensor, a tuple of arguments, or a dict of named arguments.
    """
    return trace_module(model, example).graph


def trace_module(model: nn.Module, example: Example, *, modes: Mapping[str, bool] | None = None) -> Traced:
    """Returns the traced network, ready to be cut.

    Args:
        model: the network; it is not changed. Of a compiled one the uncompiled network is traced.
        example: a batch as forward takes it.
        modes: `training` of each module; by default the network is traced in training and in evaluation.
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"a network was to be traced, but this is a {type(model).__name__}. Give a torch.nn.Module.")
    model = uncompiled(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise SpecError("a TorchScript module was given, whose layers cannot be cut. Give the module it was made of.")
    lazy_names = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy_names:
        raise SpecError(f"the parameter {lazy_names[0]!r} has no shape yet. Call the network once before sharding it.")
    complex_names = [name for name, p in model.named_parameters() if p.is_complex()]
    if complex_names:
        raise SpecError(f"the parameter {complex_names[0]!r} is complex, which has no rule. Use two real ones.")
    arguments = _arguments(model, example)
    was_fastpath_enabled = torch.backends.mha.get_fastpath_enabled()
    with _TRACING:
        torch.backends.mha.set_fastpath_enabled(False)  # in evaluation torch would fuse whole encoder layers
        try:
            return _trace(model, arguments, modes)
        finally:
            torch.backends.mha.set_fastpath_enabled(was_fastpath_enabled)


def _trace(model: nn.Module, arguments: dict[str, torch.Tensor | None], modes: Mapping[str, bool] | None) -> Traced:
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    names = [name for name, _ in model.named_modules()]
    if modes is not None:
        return _traced_in(model, modes, _open_in(model, modes, tensors), tensors)
    in_training, in_evaluation = dict.fromkeys(names, True), dict.fromkeys(names, False)
    evaluation = _open_in(model, in_evaluation, tensors)
    change_watch = ChangeWatch(model, evaluation.reads)
    training = _open_in(model, in_training, tensors, closed=evaluation.closed)
    _refuse_changes(model, change_watch)
    if training.closed.keys() - evaluation.closed.keys():  # weights of a module that is called must not be cut
        evaluation = _open_in(model, in_evaluation, tensors, closed=training.closed)
    reads = training.reads.joined(evaluation.reads)
    traced = replace(_traced_in(model, in_training, training, tensors), reads=reads)
    difference = mode_difference(training.program.graph, evaluation.program.graph)
    if difference is None:
        return replace(traced, evaluation=replace(_traced_in(model, in_evaluation, evaluation, tensors), reads=reads))
    return replace(
        traced,
        switches=difference.switches,
        training_only=difference.training_only,
        decisions=(training.decisions, evaluation.decisions),
    )


def _open_in(
    model: nn.Module,
    modes: Mapping[str, bool],
    tensors: dict[str, torch.Tensor],
    *,
    closed: Mapping[str, str] | None = None,
) -> Opened:
    with _in_modes(model, modes):
        opened = open_up(model, tensors, closed=closed)
        lower(opened.program)
        return opened


def _traced_in(model: nn.Module, modes: Mapping[str, bool], opened: Opened, tensors: dict[str, torch.Tensor]) -> Traced:
    """Returns the traced network in one mode, from its lowered program."""
    program = opened.program
    before = {name: module.training for name, module in model.named_modules()}
    with _in_modes(model, modes):
        shapes = _shapes(program, tensors)
        if _name_tuples(program, shapes.values):
            shapes = _shapes(program, tensors)
    layers = _layers(program, shapes, opened.closed)
    return Traced(
        model=model,
        program=program,
        graph=Graph(model=type(model).__name__, layers=tuple(layers)),
        output_spec=opened.output_spec,
        example={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        switches={},
        inputs={name: shape_of(tensor) for name, tensor in tensors.items()},
        modes=before,
        reads=opened.reads,
        decisions=(opened.decisions,),
    )


def _refuse_changes(model: nn.Module, change_watch: ChangeWatch) -> None:
    """Raises `SpecError` if forward changed what it reads: a cut network runs forward's Python code only once."""
    changes = change_watch.changes()
    if changes:
        raise SpecError(
            f"forward of {type(model).__name__} changes {changes[0][0]!r} which it also reads; a network whose layers "
            "are cut would not do that. Keep such state outside of forward."
        )


def _arguments(model: nn.Module, example: Example) -> dict[str, torch.Tensor | None]:
    signature = inspect.signature(model.forward)
    try:
        if isinstance(example, Mapping):
            bound = signature.bind(**example)
        else:
            bound = signature.bind(*(example if isinstance(example, tuple | list) else (example,)))
    except TypeError as error:
        raise SpecError(
            f"the example does not fit forward{signature} of {type(model).__name__}: {error}. Give a tensor, a tuple "
            "of arguments, or a dict of named arguments."
        ) from None
    arguments = dict(bound.arguments)
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for n, p in signature.parameters.items() if n in arguments):
        raise SpecError(
            f"the example has arguments that forward{signature} of {type(model).__name__} takes by *args or **kwargs, "
            "which have no rule. Name each of them in forward's signature."
        )
    unsupported = [
        name for name, value in arguments.items() if not isinstance(value, torch.Tensor) and value is not None
    ]
    if unsupported or not any(isinstance(value, torch.Tensor) for value in arguments.values()):
        raise SpecError(
            f"the example gives {unsupported or 'no tensor'}; arguments of forward must be tensors or None. "
            "Put settings into the module instead."
        )
    return arguments


@contextmanager
def _in_modes(model: nn.Module, modes: Mapping[str, bool]) -> Iterator[None]:
    """Sets `training` of every module and restores it at exit."""
    before = {name: module.training for name, module in model.named_modules()}
    for name, module in model.named_modules():
        module.training = modes.get(name, module.training)
    try:
        yield
    finally:
        for name, module in model.named_modules():
            module.training = before[name]


def _shapes(program: fx.GraphModule, tensors: dict[str, torch.Tensor]) -> Shapes:
    shapes = Shapes(program)
    order = [node for node in program.graph.nodes if node.op == "placeholder"]
    shapes.run(*[shape_of(tensors[node.target]) if node.target in tensors else None for node in order])
    return shapes


def _name_tuples(program: fx.GraphModule, values: Mapping[str, MetaValue]) -> bool:
    """Gives every tensor of a tuple exactly one node; returns whether there are tuples."""
    graph = program.graph
    tuples = [n for n in graph.nodes if n.op != "placeholder" and n.users and is_tensor_list(values.get(n.name))]
    for node in tuples:
        items: dict[int, fx.Node] = {}
        for user in list(node.users):
            if user.target is operator.getitem and user.args[0] is node and isinstance(user.args[1], int):
                index = user.args[1] % len(values[node.name])
                node.meta["has_fixed_length"] = node.meta.get("has_fixed_length", False) or user.args[1] < 0
                user.args = (node, index)  # not counted from the end
                first_user = items.setdefault(index, user)
                if first_user is not user:
                    user.replace_all_uses_with(first_user)
                    graph.erase_node(user)
        other_users = [user for user in node.users if user not in items.values()]
        if other_users:
            node.meta["has_fixed_length"] = True  # all of it is used, item by item
            with graph.inserting_after(node):
                for index in reversed(range(len(values[node.name]))):
                    if index not in items:
                        items[index] = graph.call_function(operator.getitem, (node, index))
            for user in other_users:
                _replace_by_items(user, node, [items[i] for i in range(len(items))])
                if user.target is operator.getitem and isinstance(user.args[1], slice):  # some of the tuple
                    for later in list(user.users):
                        _replace_by_items(later, user, list(user.args[0])[user.args[1]])
                    graph.erase_node(user)
    if tuples:
        graph.lint()
        program.recompile()
    return bool(tuples)


def _replace_by_items(user: fx.Node, node: fx.Node, items: list[fx.Node]) -> None:
    def replaced(value: Argument) -> Argument:
        if value is node:
            return list(items)
        if isinstance(value, tuple | list):
            return type(value)(replaced(item) for item in value)
        return value

    user.args = tuple(replaced(arg) for arg in user.args)
    user.kwargs = {key: replaced(arg) for key, arg in user.kwargs.items()}


def _layers(program: fx.GraphModule, shapes: Shapes, closed: dict[str, str]) -> list[Layer]:
    layers: list[Layer] = []
    listed_names: set[str] = set()
    values = shapes.values
    for node in program.graph.nodes:
        value = values[node.name]
        if node.target is operator.getitem and is_tensor_list(values[node.all_input_nodes[0].name]):
            continue  # an output of the node that returns the tuple
        layer = _layer(program, node, value, shapes, closed)
        new_names = [name for name in layer.inputs if name not in values and name not in listed_names]
        listed_names.update(new_names)
        layers += [_module_tensor_layer(program, name) for name in new_names]
        layers.append(layer)
    return layers


def _module_tensor_layer(program: fx.GraphModule, name: str) -> Layer:
    """Returns the layer of a parameter or buffer whose module is a single operation."""
    tensor = operator.attrgetter(name)(program)
    op = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    return Layer(name=name, op=op, kind="source", where=name, outputs=(_tensor(name, tensor),))


def _layer(program: fx.GraphModule, node: fx.Node, value: object, shapes: Shapes, closed: dict[str, str]) -> Layer:
    inputs = tuple(n.name for n in node.all_input_nodes if isinstance(shapes.values[n.name], torch.Tensor))
    outputs = _outputs(node, value)
    row = _row(program, node, outputs, shapes, closed)
    if node.name in shapes.random_nodes and row.kind == "opaque":
        row = replace(row, op="random")
    elif node.name in shapes.random_nodes and row.op not in ("dropout", "attention", "draw"):
        raise SpecError(
            f"{name_of(node)} at {path_of(node) or node.name!r} draws random numbers, for which it has no rule; "
            "ranks would draw different ones. Set its dropout to 0, or write it with layers that have a rule."
        )
    where = path_of(node)
    if node.op in ("call_module", "get_attr", "placeholder"):
        where = str(node.target)
    module_inputs = _module_inputs(program, node) if node.op == "call_module" and row.kind != "opaque" else ()
    return Layer(
        name=node.name,
        op=row.op,
        kind=row.kind,
        where=where,
        inputs=inputs + module_inputs,
        outputs=outputs,
        options=row.options,
        flops=shapes.flops.get(node.name, 0),
        note=row.note,
    )


def _module_inputs(program: fx.GraphModule, node: fx.Node) -> tuple[str, ...]:
    module = program.get_submodule(str(node.target))
    state = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return tuple(f"{node.target}.{name}" for name, tensor in state if tensor.ndim)


def _outputs(node: fx.Node, value: object) -> tuple[Tensor, ...]:
    if isinstance(value, torch.Tensor) and node.op != "output":
        return (_tensor(node.name, value),)
    if is_tensor_list(value) and node.op != "output":
        items = [user for user in node.users if user.target is operator.getitem]
        names = {int(user.args[1]) % len(value): user.name for user in items if isinstance(user.args[1], int)}
        return tuple(_tensor(names.get(i, f"{node.name}#{i}"), item) for i, item in enumerate(value))
    return ()


def _tensor(name: str, value: torch.Tensor) -> Tensor:
    kind = str(value.dtype).removeprefix("torch.")
    return Tensor(name=name, shape=tuple(value.shape), dtype=kind, has_grad=value.requires_grad)


def _row(
    program: fx.GraphModule, node: fx.Node, outputs: tuple[Tensor, ...], shapes: Shapes, closed: dict[str, str]
) -> OpKind:
    if node.op == "output":
        return OpKind("output", "output")
    if node.op == "placeholder":
        return OpKind("source", "input")
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(program)
        if is_constant(str(node.target)):  # created in forward
            return OpKind("source", "constant")
        return OpKind("source", "parameter" if isinstance(value, nn.Parameter) else "buffer")
    name = name_of(node)
    tensors = [n for n in node.all_input_nodes if isinstance(shapes.values[n.name], torch.Tensor)]
    if not outputs:
        leaves = pytree.tree_leaves(shapes.values[node.name])
        has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        unsupported = [leaf for leaf in leaves if not isinstance(leaf, PLAIN) and leaf is not None]
        if unsupported and not has_tensors and tensors:
            raise SpecError(
                f"forward creates a {type(unsupported[0]).__name__} of tensors at {node.name!r}, which has no rule. "
                "Return tensors, tuples, lists, named tuples or dicts."
            )
        if has_tensors and node.op == "call_module":
            return opaque(f"{name} has no rule")
        return opaque("nested outputs") if has_tensors else OpKind("source", "number")
    if name == "getitem" and not isinstance(shapes.values[node.all_input_nodes[0].name], torch.Tensor):
        return opaque("a part of a nested output")
    if not tensors and node.op != "call_module" and name not in DRAWS:
        return OpKind("source", "constant")
    module = program.get_submodule(str(node.target)) if node.op == "call_module" else None
    row = row_of(OpInputs(node, name, shapes.values, module))
    if node.op == "call_module" and str(node.target) in closed:
        row = opaque(f"it cannot be traced: {closed[str(node.target)]}")
    return row
