"""Where a cut network first leaves the uncut one: every tensor in between, forward and then backward."""

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from evenly.graph import Traced, name_of
from evenly.graph.tracer import is_tensor_list
from evenly.shards.gaps import Gaps
from evenly.shards.sharded import Sharded
from evenly.shards.site import Pass
from evenly.spec.layout import Record

Loss = Callable[[Any], torch.Tensor | None]


def chances(traced: Traced) -> tuple[set[str], list[str]]:
    """Returns the modules whose mode switches a dropout function off, and the functions that nothing switches off."""
    owners: set[str] = set()
    always: list[str] = []
    for node in traced.program.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        name = name_of(node)
        if node.name in traced.switches and ("dropout" in name or name == "scaled_dot_product_attention"):
            owners.add(owner_of(node))
        elif _probability(node, name) and node.name not in traced.switches:
            always.append(node.name)
    return owners, always


def owner_of(node: fx.Node) -> str:
    """Returns the path of the module in whose forward an operation stands."""
    return next(iter(reversed(list(node.meta.get("nn_module_stack") or {}))), "")


def _probability(node: fx.Node, name: str) -> Any:
    """Returns with what probability a function drops elements, as it stands in the graph."""

    def given(place: int, key: str, default: Any) -> Any:
        return node.args[place] if len(node.args) > place else node.kwargs.get(key, default)

    if name == "scaled_dot_product_attention":
        return given(4, "dropout_p", 0.0)
    return given(1, "p", 0.5) if "dropout" in name and given(2, "training", True) else 0.0


def first_difference(
    traced: Traced,
    plain: nn.Module,
    sharded: Sharded,
    arguments: tuple[Mapping[str, Any], Mapping[str, Any]],
    loss: Loss,
    gaps: Callable[[], Gaps],
    rtol: float,
) -> str | None:
    """Returns the layer whose output differs first, or else the one whose output's gradient does on the way back.

    Args:
        traced: the network's operations.
        plain: an uncut network that may be changed.
        sharded: the cut one.
        arguments: those of forward, where the uncut network is and where the cut one is.
        loss: of the outputs.
        gaps: makes an empty comparison.
        rtol: the largest difference that is none.
    """
    for module in plain.modules():
        if getattr(module, "inplace", False):
            vars(module)["inplace"] = False  # a tensor that is changed later could not be compared
    truth = _Recorder(plain, traced)
    _backward(loss(truth.run(*[arguments[0].get(name) for name in truth.inputs])))
    trace = _Trace(sharded, truth.values, arguments[1], gaps())
    _backward(loss(trace.run()))
    device = next((x.device for x in sharded.parameters()), torch.device("cpu"))
    where = {tensor.name: layer.where or layer.name for layer in traced.graph.layers for tensor in layer.outputs}
    for found in (trace.gaps, trace.gradients(truth.gradients, gaps())):
        for name, gap in found.settle(sharded.wire, device).items():
            if not gap <= rtol:
                return where.get(name, name)
    return None


class _Recorder(fx.Interpreter):
    """Runs the traced operations of an uncut network and keeps all tensors and their gradients."""

    def __init__(self, plain: nn.Module, traced: Traced) -> None:
        super().__init__(plain, graph=traced.program.graph)
        self._traced = traced
        self.inputs = [str(node.target) for node in traced.program.graph.nodes if node.op == "placeholder"]
        self.values: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node and keeps its value."""
        value = super().run_node(n)
        if n.op.startswith("call"):
            named = {n.name: value} | (
                {f"{n.name}#{i}": x for i, x in enumerate(value)} if is_tensor_list(value) else {}
            )
            for name, tensor in named.items():
                if isinstance(tensor, torch.Tensor):
                    self.values[name] = tensor.detach()
                    _keep_gradient(tensor, name, self.gradients)
        return value

    def fetch_attr(self, target: str) -> Any:
        """Returns a parameter, buffer or module; constants that tracing made are the traced network's."""
        try:
            return operator.attrgetter(target)(self.module)
        except AttributeError:
            return operator.attrgetter(target)(self._traced.program)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a node's arguments, as the mode of its module has them."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        switches = self._traced.switches.get(n.name)
        if switches:
            path = owner_of(n)
            owner = self.module.get_submodule(path) if path else self.module
            chosen = {key: pair[not owner.training] for key, pair in switches.items()}
            args = tuple(chosen.get(str(i), value) for i, value in enumerate(args))
            kwargs = {key: chosen.get(key, value) for key, value in kwargs.items()}
        return args, kwargs


class _Trace:
    """Runs a cut network and compares every tensor as it is made."""

    def __init__(
        self, sharded: Sharded, truth: Mapping[str, torch.Tensor], arguments: Mapping[str, Any], gaps: Gaps
    ) -> None:
        self._sharded, self._truth, self._arguments, self.gaps = sharded, truth, arguments, gaps
        self._now = Pass(sharded.wire, sharded._dice, sharded.layout, arguments)
        self._made: dict[str, tuple[Record, torch.Tensor]] = {}  # in forward order; without their history
        self._grads: dict[str, torch.Tensor] = {}

    def run(self) -> Any:
        """Returns the outputs."""
        program = self._sharded._program
        if program is None:
            return None
        program.listener = self._hear
        try:
            return program.run(self._arguments)
        finally:
            program.listener = None

    def gradients(self, truth: Mapping[str, torch.Tensor], gaps: Gaps) -> Gaps:
        """Compares the gradients of all tensors, the last one first."""
        for name, (record, value) in reversed(self._made.items()):
            if name in truth:
                grad = self._grads.get(name, torch.zeros_like(value))
                gaps.add(name, self._whole(grad, record, summed="copied"), truth[name])
        return gaps

    def _hear(self, name: str, record: Record, value: Any) -> None:
        if name not in self._truth or not isinstance(value, torch.Tensor):
            return
        self._made[name] = record, value.detach()
        _keep_gradient(value, name, self._grads)
        self.gaps.add(name, self._whole(value.detach(), record, summed="partial"), self._truth[name])

    def _whole(self, value: torch.Tensor, record: Record, *, summed: str) -> torch.Tensor:
        wire = self._sharded.wire
        if record.state == "sharded":
            return wire.gather(value, record.dim, self._now.segments(record), name="verify").wait()
        return wire.sum(value, name="verify").wait() if record.state == summed else value


def _keep_gradient(tensor: torch.Tensor, name: str, kept: dict[str, torch.Tensor]) -> None:
    if tensor.requires_grad:
        tensor.register_hook(partial(kept.__setitem__, name))  # type: ignore[no-untyped-call]  # torch has no annotation here


def _backward(loss: torch.Tensor | None) -> None:
    if loss is not None and loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
