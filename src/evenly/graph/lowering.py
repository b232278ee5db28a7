"""Normalizes a traced graph: no in-place operations, biases as separate operations, positional tensor arguments."""

import operator

import torch
from torch import fx, nn
from torch.fx.node import Argument, Target
from torch.nn import functional as F  # noqa: N812

from evenly._torch.operators import OpOverload, out_of_place
from evenly._torch.tracing import is_constant
from evenly.errors import SpecError
from evenly.graph.inserted import DRAWS_IN_PLACE, IN_PLACE, assign, draw_like, fill, overwrite
from evenly.graph.torch_code import function_name, is_torch_function, module_name

VIEWS = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel", "Flatten"}
VIEWS |= {"Unflatten", "permute", "transpose", "t", "swapaxes", "swapdims", "movedim", "chunk", "split", "tensor_split"}
VIEWS |= {"unbind", "narrow", "select", "getitem", "expand", "expand_as", "detach", "contiguous", "Identity", "to"}
VIEWS |= {"double", "float", "half", "bfloat16", "type", "type_as", "cpu", "cuda", "T", "mT", "H", "mH", "real", "imag"}
VIEWS |= {"data", "diagonal", "unfold", "positive", "atleast_1d", "atleast_2d", "atleast_3d", "dropout", "dropout1d"}
VIEWS |= {"dropout2d", "dropout3d", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "moveaxis", "adjoint", "conj"}
VIEWS |= {"as_strided", "view_as_real", "view_as_complex", "hsplit", "vsplit", "dsplit", "resolve_conj", "resolve_neg"}
VIEWS |= {"broadcast_to", "alias", "unsafe_chunk", "unsafe_split", "split_with_sizes", "getattr", "interpolate", "pad"}
FILLS = {"zero_", "fill_"}
SHAPED_LIKE = {"view_as": "view", "reshape_as": "reshape", "expand_as": "expand"}  # of another tensor only the shape
CONVS = {
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
}
_NUMPY = {"axis": "dim", "keepdims": "keepdim"}  # torch accepts numpy's keywords too
LEADING: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("conv1d", "conv2d", "conv3d", "conv_transpose", "linear", "embedding"), ("input", "weight")),
    (("scaled_dot_product_attention",), ("query", "key", "value")),
    (("cat", "concat", "stack"), ("tensors", "dim")),
)


def add_bias(x: torch.Tensor, bias: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns x + bias, with the bias along `dim`."""
    num_after = x.ndim - 1 - dim % x.ndim  # dims after it
    return x + (bias.view(-1, *[1] * num_after) if num_after else bias)


def name_of(node: fx.Node) -> str:
    """Returns the short name of a torch operation (`conv2d`, `add`, `ReLU`); the qualified name of any other."""
    if node.op == "call_module":
        owner = node.graph.owning_module
        return module_name(owner.get_submodule(str(node.target))) if owner is not None else str(node.target)
    if node.op == "call_function":
        return function_name(node.target)
    return str(node.target)


def path_of(node: fx.Node) -> str:
    """Returns the path of the module in whose forward a node was traced."""
    stack = node.meta.get("nn_module_stack") or {}
    key, value = next(iter(reversed(list(stack.items()))), ("", ""))
    path = value[0] if isinstance(value, tuple) else key
    return str(path)


def lower(program: fx.GraphModule) -> None:
    """Normalizes a traced graph in place."""
    graph = program.graph
    _share_attributes(program)
    _replace_in_place_operations(graph)
    for node in list(graph.nodes):
        name = name_of(node)
        if node.op in ("call_function", "call_method"):
            node.kwargs = {_NUMPY.get(key, key): value for key, value in node.kwargs.items()}
        if node.op == "call_method" and node.target in SHAPED_LIKE:
            _shape_like(node)
        if node.op != "call_function" or not is_torch_function(node.target):
            continue
        _make_positional(node, name)
        if node.target in CONVS or (name.startswith(("conv1d", "conv2d", "conv3d", "conv_transpose"))):
            _split_bias(node, 2, dim=-1 - int(name[name.index("d") - 1]))
            _subsample(program, node)
        elif name == "linear":
            _split_bias(node, 2, dim=-1)
        elif name == "addmm" and len(node.args) == 3 and not node.kwargs:
            _decompose_addmm(node)
        elif name == "glu":
            _decompose_glu(node)
        elif node.target is getattr and node.args[1] == "mT":
            _decompose_transpose(node)
    graph.eliminate_dead_code(lambda node: node.is_impure() or node.target is assign)
    graph.lint()
    program.recompile()  # its code is compared between ranks


def _make_positional(node: fx.Node, name: str) -> None:
    """Makes tensor arguments positional that were passed by keyword (`F.linear(input=x, weight=w)`)."""
    names = next((order for kinds, order in LEADING if name.startswith(kinds)), ("input", "other"))
    args, kwargs = list(node.args), dict(node.kwargs)
    while len(args) < len(names) and names[len(args)] in kwargs:
        args.append(kwargs.pop(names[len(args)]))
    node.args, node.kwargs = tuple(args), kwargs


def _share_attributes(program: fx.GraphModule) -> None:
    """Merges the nodes of tied parameters into the first one."""
    first_nodes: dict[int, fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.op != "get_attr":
            continue
        value = operator.attrgetter(str(node.target))(program)
        first_node = first_nodes.setdefault(id(value), node)
        if first_node is not node:
            node.replace_all_uses_with(first_node)
            program.graph.erase_node(node)


def _replace_in_place_operations(graph: fx.Graph) -> None:
    _follow_replaced_buffers(graph)
    states: dict[fx.Node, fx.Node] = {}  # the parameter or buffer that a node is, after changes in place
    for node in list(graph.nodes):
        if node.op == "get_attr" and not is_constant(str(node.target)):
            states[node] = node
        if node.target is assign:
            states[node.args[1]] = node.args[0]
            continue
        _refuse_overwriting(node)
        target = _out_of_place_target(node)
        changed = node.args[0] if target is not None else None
        if target is None or not isinstance(changed, fx.Node):
            continue
        state = states.get(_viewed(changed))
        if state is not None and (_is_parameter(state) or changed not in states):
            part = "" if changed in states else " a part of"
            raise SpecError(
                f"forward changes{part} {state.target!r} in place, which has no rule for a network whose layers are "
                "cut. Change it outside of forward, or remove the change."
            )
        if target is draw_like:
            node.op, node.args = "call_function", (changed, name_of(node), *node.args[1:])
        elif target in (overwrite, fill):
            node.op = "call_function"
        node.target = target
        written = node if _is_number(changed) else _write_into_base(changed, node)
        if not _is_number(changed):
            _refuse_views(changed, node, written)
            _redirect_later_users(changed, node)
        if state is not None:
            states[node] = state
            with graph.inserting_after(node):
                assigned = graph.call_function(assign, (state, node))
            assigned.meta.update({key: node.meta[key] for key in ("nn_module_stack",) if key in node.meta})


def _out_of_place_target(node: fx.Node) -> Target | None:
    """Returns the operation that gives the result of an in-place one as a new tensor; None if it is not in place."""
    target: Target | None = None
    if node.target is operator.setitem:
        target = overwrite
    elif node.op == "call_method" and node.target in DRAWS_IN_PLACE:
        target = draw_like
    elif node.op == "call_method" and node.target in FILLS:
        target = fill
    elif node.op == "call_function" and node.target in IN_PLACE:
        target = IN_PLACE[node.target]
    elif node.op == "call_function" and not is_torch_function(node.target):
        target = None  # `Shapes` checks whether it changes its inputs
    elif node.op == "call_function" and isinstance(node.target, OpOverload):
        is_draw = name_of(node) in DRAWS_IN_PLACE
        target = draw_like if is_draw else out_of_place(node.target)
    elif node.op == "call_function" and name_of(node).endswith("_") and name_of(node)[0] != "_":
        target = getattr(F, name_of(node)[:-1], None) or getattr(torch, name_of(node)[:-1], None)
    elif node.op == "call_method" and name_of(node).endswith("_") and not name_of(node).endswith("__"):
        target = name_of(node).removesuffix("_")
    elif node.op == "call_function" and node.kwargs.get("inplace"):
        target = node.target
        node.kwargs = {**node.kwargs, "inplace": False}
    elif node.op == "call_module" and getattr(_module(node), "inplace", False):
        target = node.target  # the copy of the module that is called has inplace=False
    return target


def _viewed(node: fx.Node) -> fx.Node:
    """Returns the tensor of which a node is a view; the node itself if it is none."""
    while name_of(node) in VIEWS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_parameter(node: fx.Node) -> bool:
    """Whether a node reads a parameter of the network, and not a buffer."""
    owner = node.graph.owning_module
    return owner is None or isinstance(operator.attrgetter(str(node.target))(owner), nn.Parameter)


def _refuse_overwriting(node: fx.Node) -> None:
    """Raises `SpecError` for an operation that only exists in place and writes into a tensor."""
    name = name_of(node)
    fills = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    if node.kwargs.get("out") is not None or (
        fills and name not in DRAWS_IN_PLACE | FILLS and not hasattr(torch.Tensor, name[:-1])
    ):
        raise SpecError(
            f"forward writes into a tensor ({name} at {node.name!r}), which has no rule for a network whose layers are "
            "cut. Make a new tensor instead: torch.where, torch.cat, x = x + 1."
        )


def _write_into_base(changed: fx.Node, node: fx.Node) -> fx.Node:
    """Makes a change of `x[index]` in place, as in `x[0].zero_()`, a change of x; returns the last node of it."""
    if changed.target is not operator.getitem or _is_number(changed):
        return node
    base, index = changed.args
    if not isinstance(base, fx.Node) or name_of(base) in VIEWS or base.op in ("placeholder", "get_attr"):
        return node
    with node.graph.inserting_after(node):
        written = node.graph.call_function(overwrite, (base, index, node))
    written.meta.update({key: node.meta[key] for key in ("nn_module_stack",) if key in node.meta})
    _redirect_later_users(base, written)
    return written


def _is_number(node: fx.Node) -> bool:
    """Whether a value is a number computed from sizes; `+=` does not change numbers in place."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "__len__")
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    made_of = node.all_input_nodes
    return node.op == "call_function" and bool(made_of) and all(_is_number(n) for n in made_of)


def _refuse_views(changed: fx.Node, node: fx.Node, written: fx.Node) -> None:
    """Raises `SpecError` if a tensor that shares memory with the changed one is used afterwards."""
    order = {n: position for position, n in enumerate(node.graph.nodes)}
    aliases, pending = {changed}, [changed]
    while pending:
        alias = pending.pop()
        neighbours = [
            n for n in alias.users if name_of(n) in VIEWS and n.all_input_nodes[0] is alias and order[n] < order[node]
        ]
        neighbours += alias.all_input_nodes[:1] if name_of(alias) in VIEWS else []
        pending += [n for n in neighbours if n not in aliases]
        aliases |= set(neighbours)
    used_later = [n for n in aliases - {changed} for user in n.users if order[user] > order[written]]
    if used_later:
        raise SpecError(
            f"forward changes {changed.name!r} in place, but {used_later[0].name!r}, which shares memory with it, is "
            "used later. Write the change as a new tensor, such as x = x + 1 instead of x += 1."
        )


def _module(node: fx.Node) -> nn.Module | None:
    owner = node.graph.owning_module
    return owner.get_submodule(str(node.target)) if owner is not None else None


def _redirect_later_users(changed: Argument, result: fx.Node, *, value: Argument | None = None) -> None:
    """Makes users of `changed` that come after the in-place operation `result` use its result, or `value`."""
    if not isinstance(changed, fx.Node):
        return
    new = value if isinstance(value, fx.Node) else result
    is_after_result = False
    later = set()
    for node in result.graph.nodes:
        if is_after_result:
            later.add(node)
        is_after_result = is_after_result or node is result
    for user in list(changed.users):
        if user in later and user.target is assign and user.args[0] is changed:
            user.args = (changed, new if user.args[1] is changed else user.args[1])
        elif user in later:
            user.replace_input_with(changed, new)


def _follow_replaced_buffers(graph: fx.Graph) -> None:
    """Makes operations after `self.count = self.count + 1` use the new value; those before it get a copy of the old."""
    assignments = [node for node in graph.nodes if node.target is assign]
    for node in reversed(assignments):
        _redirect_later_users(node.args[0], node, value=node.args[1])
    for buffer in dict.fromkeys(node.args[0] for node in assignments):
        _clone_for_readers(buffer)


def _clone_for_readers(buffer: Argument) -> None:
    """Gives those that read a buffer before forward replaces it a copy: backward may need the old values."""
    readers = [user for user in buffer.users if user.target is not assign] if isinstance(buffer, fx.Node) else []
    if isinstance(buffer, fx.Node) and readers:
        with buffer.graph.inserting_after(buffer):
            clone = buffer.graph.call_method("clone", (buffer,))
        for user in readers:
            user.replace_input_with(buffer, clone)


def _split_bias(node: fx.Node, position: int, *, dim: int) -> None:
    """Adds the bias as a separate operation, so that a sum over ranks can come before it."""
    bias = node.args[position] if len(node.args) > position else node.kwargs.get("bias")
    if bias is None or not _is_plain_bias(node, bias):
        return
    if len(node.args) > position:
        node.args = (*node.args[:position], None, *node.args[position + 1 :])
    else:
        node.kwargs = {**node.kwargs, "bias": None}
    with node.graph.inserting_after(node):
        added = node.graph.call_function(add_bias, (node, bias, dim))
    node.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)
    added.meta.update({key: node.meta[key] for key in ("nn_module_stack",) if key in node.meta})


def _is_plain_bias(node: fx.Node, bias: Argument) -> bool:
    """Whether a bias has one number for each output; true if its value is not known."""
    owner = node.graph.owning_module
    if not isinstance(bias, fx.Node) or bias.op != "get_attr" or owner is None:
        return True
    value = operator.attrgetter(str(bias.target))(owner)
    if not isinstance(value, torch.Tensor):
        return True
    return value.ndim == 1 and (value.numel() > 1 or _has_one_output(node, owner))


def _has_one_output(node: fx.Node, owner: fx.GraphModule) -> bool:
    """Whether the layer's weight gives one output; a bias of one number is else added to several."""
    weight = node.args[1] if len(node.args) > 1 else None
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return False
    transposed = "transpose" in name_of(node)
    groups = (node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)) if transposed else 1
    out_dim = 1 if transposed else 0  # of the weight
    return bool(groups == 1 and operator.attrgetter(str(weight.target))(owner).shape[out_dim] == 1)


def _subsample(program: fx.GraphModule, node: fx.Node) -> None:
    """Makes a strided 1x1 convolution a slice and an unstrided convolution: ranks send fewer pixels."""
    x, weight = node.args[:2]
    strides = node.args[3] if len(node.args) > 3 else 1
    padding = node.args[4] if len(node.args) > 4 else 0
    if not (isinstance(weight, fx.Node) and weight.op == "get_attr") or "transpose" in name_of(node):
        return
    kernel = operator.attrgetter(str(weight.target))(program).shape[2:]
    steps = tuple(strides) if isinstance(strides, tuple | list) else (strides,) * len(kernel)
    pads = tuple(padding) if isinstance(padding, tuple | list) else (padding,) * len(kernel)
    if any(size != 1 for size in kernel) or any(pads) or all(step == 1 for step in steps):
        return
    with node.graph.inserting_before(node):
        strided_index = (slice(None), slice(None), *(slice(None, None, step) for step in steps))
        subsampled = node.graph.call_function(operator.getitem, (x, strided_index))
    subsampled.meta.update({key: node.meta[key] for key in ("nn_module_stack",) if key in node.meta})
    node.args = (subsampled, weight, node.args[2], (1,) * len(kernel), *node.args[4:])


def _shape_like(node: fx.Node) -> None:
    """Makes `x.view_as(other)` a view with the shape of the other tensor, which then need not be sent."""
    x, other = (*node.args, *node.kwargs.values())
    if isinstance(other, fx.Node):
        with node.graph.inserting_before(node):
            shape = node.graph.call_function(getattr, (other, "shape"))
        node.target = SHAPED_LIKE[str(node.target)]
        node.args, node.kwargs = (x, shape), {}


def _decompose_addmm(node: fx.Node) -> None:
    bias, x, weight = node.args
    with node.graph.inserting_before(node):
        product = node.graph.call_function(torch.matmul, (x, weight))
        added = node.graph.call_function(operator.add, (product, bias))
    node.replace_all_uses_with(added)
    node.graph.erase_node(node)


def _decompose_transpose(node: fx.Node) -> None:
    with node.graph.inserting_before(node):
        transposed = node.graph.call_method("transpose", (node.args[0], -2, -1))
    node.replace_all_uses_with(transposed)
    node.graph.erase_node(node)


def _decompose_glu(node: fx.Node) -> None:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)
    with node.graph.inserting_before(node):
        halves = node.graph.call_method("chunk", (node.args[0], 2), {"dim": dim})
        first, second = (node.graph.call_function(operator.getitem, (halves, i)) for i in range(2))
        gate = node.graph.call_function(torch.sigmoid, (second,))
        product = node.graph.call_function(operator.mul, (first, gate))
    node.replace_all_uses_with(product)
    node.graph.erase_node(node)
