"""Finds the first layer at which a cut network differs from the uncut one, in forward and then in backward."""

import operator
from collections.abc import Callable, Mapping

import torch
from torch import fx, nn

from evenly.graph import Traced, name_of
from evenly.graph.tracer import is_tensor_list
from evenly.shards.run.op_instance import ForwardContext, switch
from evenly.shards.run.program import Program
from evenly.shards.run.sharded import Sharded
from evenly.shards.verification.tolerance import Differences
from evenly.spec.layout import TensorPlacement


def dropout_modes(traced: Traced) -> tuple[set[str], list[str]]:
    """Returns the modules whose mode switches a dropout function off, and the functions that nothing switches off."""
    owners: set[str] = set()
    always: list[str] = []
    random_names = {layer.name for layer in traced.graph.layers if layer.op in ("draw", "random")}
    still_random = _random_owners(traced.evaluation) if traced.evaluation is not None else None
    for node in traced.program.graph.nodes:
        if node.name in random_names:
            owner = str(node.target) if node.op == "call_module" else owner_of(node)
            is_switched = node.op == "call_module" or (still_random is not None and owner not in still_random)
            owners |= {owner} if is_switched else set()
            always += [] if is_switched else [node.name]
            continue
        if node.op not in ("call_function", "call_method"):
            continue
        name = name_of(node)
        if node.name in traced.switches and ("dropout" in name or name == "scaled_dot_product_attention"):
            owners.add(owner_of(node))
        elif _probability(node, name) and node.name not in traced.switches:
            always.append(node.name)
    return owners, always


def _random_owners(traced: Traced) -> set[str]:
    """Returns the modules in whose forward random numbers are drawn."""
    random_names = {layer.name for layer in traced.graph.layers if layer.op in ("draw", "random")}
    return {owner_of(node) for node in traced.program.graph.nodes if node.name in random_names}


def owner_of(node: fx.Node) -> str:
    """Returns the path of the module whose forward contains an operation."""
    return next(iter(reversed(list(node.meta.get("nn_module_stack") or {}))), "")


def _probability(node: fx.Node, name: str) -> object:
    """Returns the dropout probability of a function, as written in the graph."""

    def argument(index: int, key: str, default: object) -> object:
        return node.args[index] if len(node.args) > index else node.kwargs.get(key, default)

    if name == "scaled_dot_product_attention":
        return argument(4, "dropout_p", 0.0)
    return argument(1, "p", 0.5) if "dropout" in name and argument(2, "training", True) else 0.0


class LayerRecorder(fx.Interpreter):
    """Runs the traced operations of an uncut network, which it may change, and records all tensors and gradients."""

    def __init__(self, plain: nn.Module, traced: Traced) -> None:
        super().__init__(plain, graph=traced.program.graph)
        for module in plain.modules():
            if getattr(module, "inplace", False):
                vars(module)["inplace"] = False  # a tensor that is changed in place could not be compared
        self._traced = traced
        self.inputs = [str(node.target) for node in traced.program.graph.nodes if node.op == "placeholder"]
        self.values: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> object:
        """Runs one node and records its value."""
        value = super().run_node(n)
        if n.op.startswith("call"):
            named = {n.name: value} | (
                {f"{n.name}#{i}": x for i, x in enumerate(value)} if is_tensor_list(value) else {}
            )
            for name, tensor in named.items():
                if isinstance(tensor, torch.Tensor):
                    self.values[name] = tensor.detach()
                    _record_gradient(tensor, name, self.gradients)
        return value

    def fetch_attr(self, target: str) -> object:
        """Returns a parameter, buffer or module; constants that tracing made are the traced network's."""
        try:
            return operator.attrgetter(target)(self.module)
        except AttributeError:
            return operator.attrgetter(target)(self._traced.program)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[object, ...], dict[str, object]]:
        """Returns a node's arguments for the mode of its module."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        switches = self._traced.switches.get(n.name)
        if not switches:
            return args, kwargs
        path = owner_of(n)
        return switch(args, kwargs, switches, self.module.get_submodule(path) if path else self.module)


class LayerComparison:
    """Runs a cut network and compares every tensor that it computes; all ranks call each method together.

    Args:
        sharded: the network.
        program: its steps.
        truth: the tensors of the uncut one.
        exact: the same in float64, if `truth` is in a smaller type.
    """

    def __init__(self, sharded: Sharded, program: Program, truth: LayerRecorder, exact: LayerRecorder | None) -> None:
        self._sharded = sharded
        self._program = program
        self._truth = truth
        self._exact = exact
        self._tensors: dict[str, tuple[TensorPlacement, torch.Tensor]] = {}  # in forward order; detached
        self._grads: dict[str, torch.Tensor] = {}

    def run(self, arguments: Mapping[str, object], differences: Differences) -> object:
        """Returns the outputs, and adds all tensors to `differences`."""
        self._context = ForwardContext(
            self._sharded.shard_group, self._sharded._dropout_stream, self._program.layout, arguments
        )
        true_values, exact_values = self._truth.values, self._exact.values if self._exact is not None else {}

        def record_tensor(name: str, placement: TensorPlacement, value: object) -> None:
            if name in true_values and isinstance(value, torch.Tensor):
                self._tensors[name] = placement, value.detach()
                _record_gradient(value, name, self._grads)
                differences.add(
                    name,
                    self._full(value.detach(), placement, summed="partial"),
                    true_values[name],
                    exact_values.get(name),
                )

        self._program.listener = record_tensor
        try:
            return self._program.run(arguments)
        finally:
            self._program.listener = None

    def gradients(self, differences: Differences) -> Differences:
        """Adds the gradients of all tensors to `differences`, the last one first."""
        true_gradients, exact_gradients = (
            self._truth.gradients,
            self._exact.gradients if self._exact is not None else {},
        )
        for name, (placement, value) in reversed(self._tensors.items()):
            if name in true_gradients:
                grad = self._grads.get(name, torch.zeros_like(value))
                differences.add(
                    name, self._full(grad, placement, summed="copied"), true_gradients[name], exact_gradients.get(name)
                )
        return differences

    def first(
        self, compared: list[Differences], reduce: Callable[[Differences], dict[str, float]], rtol: float
    ) -> str | None:
        """Returns the layer whose output, or then whose output's gradient, is the first to differ."""
        layers = self._program.traced.graph.layers
        where = {tensor.name: layer.where or layer.name for layer in layers for tensor in layer.outputs}
        for differences in compared:
            for name, difference in reduce(differences).items():
                if not difference <= rtol:
                    return where[name]
        return None

    def _full(self, value: torch.Tensor, placement: TensorPlacement, *, summed: str) -> torch.Tensor:
        shard_group = self._sharded.shard_group
        if placement.state == "sharded":
            return shard_group.gather(value, placement.dim, self._context.segments(placement), name="verify").wait()
        return shard_group.sum(value, name="verify").wait() if placement.state == summed else value


def _record_gradient(tensor: torch.Tensor, name: str, gradients: dict[str, torch.Tensor]) -> None:
    def record(gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # as of an output that nothing uses, if another output of its operation is used
            gradients[name] = gradient

    if tensor.requires_grad:
        tensor.register_hook(record)


def backward(loss: torch.Tensor | None) -> None:
    """Computes gradients, if there are any to compute."""
    if loss is not None and loss.requires_grad:
        loss.backward()
