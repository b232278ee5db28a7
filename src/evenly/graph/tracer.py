"""Traces a network to an fx graph of functions: modules with weights are opened, untraceable ones stay closed."""

import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeGuard, TypeVar

import torch
from torch import fx, nn
from torch.fx.node import Argument, Target

from evenly._torch import pytree
from evenly._torch.compiler import uncompiled
from evenly._torch.modules import Convolution
from evenly._torch.tracing import PROXY_FIELDS, PlainTracer, is_constant, with_class_forward
from evenly.errors import SpecError
from evenly.graph.decisions import Decision, Decisions, decisions_of
from evenly.graph.exported import exported
from evenly.graph.reads import Reads, recording_reads
from evenly.graph.rewrites import REWRITES
from evenly.graph.shapes import MetaValue, call_on_meta, shape_of
from evenly.graph.torch_code import is_torch_function, refuse_overridden_call, refuse_strange_tensors, torch_class_of
from evenly.graph.tracing_guards import (
    RefusingRandomNumbers,
    forward_of_class,
    intercepting_torch,
    refuse_hooks,
    refusing_python_random,
    refusing_stored_tensors,
    restoring_attributes,
)

T = TypeVar("T")
R = TypeVar("R")
OPENED = (
    nn.Linear,
    Convolution,
    nn.Embedding,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.PReLU,
    nn.MultiheadAttention,
    nn.GLU,
    nn.RNNBase,
    nn.TransformerEncoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoderLayer,
    nn.TransformerDecoder,
    nn.Flatten,
    nn.Unflatten,
    nn.Identity,
)


DEVICE_ATTRIBUTES = {"device", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "get_device"}


@dataclass(frozen=True)
class Opened:
    """A traced network: its operations, closed modules with the reason, recorded reads and decisions."""

    program: fx.GraphModule
    closed: dict[str, str]
    output_spec: pytree.TreeSpec | None  # of what forward returns
    reads: Reads
    decisions: Decisions


class TracedValue(fx.Proxy):
    """A traced value; unlike fx's, `x += 1` is an in-place operation, which other names of x see too."""

    def __index__(self) -> int:
        """Returns a size that does not depend on the batch, where Python needs a number: range(n), torch.ones(n)."""
        number: int = self.tracer.number(self)  # type: ignore[attr-defined]  # our tracer
        return number

    __int__ = __index__

    def __getattr__(self, k: str) -> "Attribute":
        """Returns an attribute, or a method to be called."""
        return Attribute(self, k)

    def __setattr__(self, name: str, value: object) -> None:
        """Sets the fields of fx; forward cannot set attributes of a tensor."""
        if name not in PROXY_FIELDS:
            raise fx.proxy.TraceError(f"it sets the attribute {name!r} of a tensor")
        object.__setattr__(self, name, value)

    def __setitem__(self, index: object, value: object) -> None:
        """Writes into a part of a tensor, which other names of it see too."""
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __float__(self) -> float:
        """Returns a size as a number."""
        return float(self.tracer.number(self))  # type: ignore[attr-defined]  # our tracer


class Attribute(fx.proxy.Attribute):
    """An attribute of a value, such as `x.mT`, which shares its memory."""


def _in_place(operation: Callable[..., object]) -> Callable[[fx.Proxy, object], fx.Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", operation, (self, other), {})


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"):
    for _kind in (TracedValue, Attribute):
        setattr(_kind, f"__{_name}__", _in_place(getattr(operator, _name)))


class Tracer(PlainTracer):
    """Opens modules whose weights can be cut; modules named in `closed` are single operations."""

    proxy_buffer_attributes = True  # buffers are traced like parameters, not constants

    def __init__(
        self,
        closed: dict[str, str],
        inputs: dict[str, torch.Tensor],
        closed_functions: Set[Callable[..., object]] = frozenset(),
    ) -> None:
        super().__init__(autowrap_functions=())
        self.closed = closed
        self._closed_functions = closed_functions  # those of `fx.wrap` that cannot be traced
        self.open_modules: list[str] = []  # the modules whose forward is being traced
        self.open_functions: list[Callable[..., object]] = []  # the functions of `fx.wrap` that are being traced
        self.output_spec: pytree.TreeSpec | None = None  # of what forward returns
        self._depth = 0
        self._settings = _settings()
        resizings = ((1, 0), (1, 1), (0, 1), (64, 0))  # batch size = factor * the example's + added
        self._resized_examples = [ResizedExample(self, inputs, factor, added) for factor, added in resizings]
        self.decisions: list[tuple[fx.Node, Decision]] = []
        self._thread = threading.get_ident()  # fx patches modules for all threads

    def forget(self) -> None:
        """Lets go of the network: traced values refer to this tracer in circles, which would keep its weights long."""
        thread = self._thread
        vars(self).clear()
        self._thread = thread  # other threads may still be in a patch of fx, and ask for it

    def create_arg(self, a: object) -> Argument:
        """Returns an argument as graphs store it; the structure of the last one, forward's result, is kept."""
        self._depth += 1
        try:
            if self._depth == 1:
                self.output_spec = pytree.tree_structure(a)
            return super().create_arg(a)
        finally:
            self._depth -= 1

    def create_node(
        self,
        kind: str,
        target: Target,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        name: str | None = None,
        type_expr: object = None,
    ) -> fx.Node:
        """Adds an operation; raises if a mode of torch changed, which the graph would lose."""
        if _settings() != self._settings:
            raise fx.proxy.TraceError("it switches gradients or autocast on or off inside of forward")
        return super().create_node(kind, target, args, kwargs, name, type_expr)

    def create_proxy(self, kind: str, target: Target, args: Any, kwargs: Any, *others: Any, **options: Any) -> Any:
        """Adds an operation and returns its value; a function of `fx.wrap` is traced too, if that works."""
        if kind != "call_function" or not _is_users(target) or target in self._closed_functions:
            return super().create_proxy(kind, target, args, kwargs, *others, **options)
        self.open_functions.append(target)
        result = target(*args, **kwargs)
        self.open_functions.pop()  # not after an error: `open_up` then closes the innermost function
        return result

    def for_example(self, obj: fx.Proxy) -> MetaValue:
        """Returns a traced value for the example, with tensors on the meta device."""
        return self._resized_examples[0].value(obj.node)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decides a branch that depends on sizes other than the batch."""
        first, *others = self._values_by_batch_size(obj)
        if isinstance(first, torch.Tensor) or any(bool(first) != bool(other) for other in others):
            super().to_bool(obj)
        return bool(self._decide(obj, bool, first))

    def number(self, obj: fx.Proxy) -> int | float:
        """Returns a size that is the same for all batches."""
        first, *others = self._values_by_batch_size(obj)
        if not isinstance(first, int | float) or any(first != other for other in others):
            raise fx.proxy.TraceError("a number is needed, but this one depends on values or on the batch")
        return self._decide(obj, _identity, first)

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        """Returns the items of a tuple whose length does not depend on the batch."""
        first, *others = self._values_by_batch_size(obj)
        if isinstance(first, tuple | list) and all(len(first) == len(other) for other in others):
            self._decide(obj, len, first)
            return iter([obj[index] for index in range(len(first))])  # type: ignore[index]  # a proxy takes any index
        if isinstance(first, tuple | list | torch.Tensor):
            self._decide(obj, len, first)
        return super().iter(obj)

    def _values_by_batch_size(self, obj: fx.Proxy) -> list[MetaValue]:
        """Returns the value of a node for the example and for other batch sizes; raises if it depends on the device."""
        pending, visited = [obj.node], set()
        while pending:
            node = pending.pop()
            attribute = node.args[1] if node.target is getattr else node.target if node.op == "call_method" else ""
            if attribute in DEVICE_ATTRIBUTES:
                raise fx.proxy.TraceError("it depends on the device, which is not known yet")
            visited.add(node)
            pending += [n for n in node.all_input_nodes if n not in visited]
        return [resized.value(obj.node) for resized in self._resized_examples]

    def _decide(self, obj: fx.Proxy, evaluate: Callable[[T], R], value: T) -> R:
        """Returns `evaluate(value)` and records it as a decision: it must be the same for other batches."""
        result = evaluate(value)
        where = self.open_modules[-1] if self.open_modules else ""
        self.decisions.append((obj.node, Decision(obj.node.name, evaluate, result, where)))
        return result

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Returns the traced value of a node."""
        return TracedValue(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is a single operation."""
        if module_qualified_name in self.closed:
            return True
        if uncompiled(m) is not m:
            return False
        return torch_class_of(m) is type(m) and not isinstance(m, (*OPENED, nn.Sequential))

    def getattr(self, attr: str, attr_val: object, parameter_proxy_cache: dict[str, fx.Proxy]) -> object:
        """Returns an attribute of a module; parameters and buffers as traced values."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(
        self, m: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Traces a module, or its traceable version."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        rewrite = REWRITES.get(torch_class_of(m) or type(None))
        if name in self.closed:
            refuse_overridden_call(m, name)
            _refuse_compiled(m, name)
        elif uncompiled(m) is not m:
            forward = uncompiled(m)
        elif rewrite is not None:
            forward = lambda *a, **k: rewrite(m, *a, **k)  # noqa: E731
        self.open_modules.append(name)
        result = super().call_module(m, forward, args, kwargs)
        self.open_modules.pop()  # not after an error: `open_up` then needs the innermost module
        is_recurrent = isinstance(m, nn.RNNBase) and isinstance(result, fx.Proxy)
        return _recurrent_results(m, result) if is_recurrent else result


def _recurrent_results(module: nn.Module, result: Any) -> tuple[object, object]:
    """Returns the output and the states of a recurrent module that is one operation: forward may ask for their type."""
    output, states = result[0], result[1]
    return output, (states[0], states[1]) if isinstance(module, nn.LSTM) else states


def _refuse_compiled(module: nn.Module, path: str) -> None:
    """Raises `SpecError` if a module that is called as it is holds a compiled one: that uses the uncut parameters."""
    if any(uncompiled(inner) is not inner for inner in module.modules()):
        raise SpecError(
            f"the module {path!r} cannot be traced, so it is called as it is, but a module in it was compiled with the "
            "parameters of the uncut network. Do not compile it before sharding."
        )


def _is_users(target: Target) -> TypeGuard[FunctionType]:
    """Whether a traced function is not torch's: the user gave it to `fx.wrap`."""
    is_python = isinstance(target, FunctionType) and not target.__module__.startswith("torch.")
    return is_python and not is_torch_function(target)


def _identity(value: T) -> T:
    return value


def _settings() -> tuple[object, ...]:
    """Returns the modes of torch that a graph does not record."""
    kinds = ("cpu", "cuda")
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts


class ResizedExample:
    """Values of the nodes of an unfinished graph for the example with another number of samples."""

    def __init__(self, tracer: Tracer, inputs: dict[str, torch.Tensor], factor: int, added: int) -> None:
        self._tracer = tracer
        self._values: dict[fx.Node, MetaValue] = {}
        self._inputs = {
            name: torch.empty(
                (tensor.shape[0] * factor + added, *tensor.shape[1:]),
                dtype=tensor.dtype,
                device="meta",
                requires_grad=tensor.requires_grad,
            )
            if tensor.ndim
            else shape_of(tensor)
            for name, tensor in inputs.items()
        }

    def value(self, node: fx.Node) -> MetaValue:
        """Returns the value of a node, with tensors on the meta device."""
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: fx.Node) -> MetaValue:
        if node.op == "placeholder":
            return self._inputs.get(str(node.target))
        root = self._tracer.root
        if node.op == "get_attr":  # by name: while fx traces, getattr on a module returns traced values
            named = dict(root.named_parameters(remove_duplicate=False)) | dict(
                root.named_buffers(remove_duplicate=False)
            )
            tensor = named.get(str(node.target), root.__dict__.get(str(node.target)))
            return tensor if tensor is None else shape_of(tensor)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.value)
        kwargs = {**kwargs, "device": "meta"} if "device" in kwargs else dict(kwargs)
        with torch.device("meta"):
            return self._run(node, root, args, kwargs)

    def _run(
        self, node: fx.Node, root: nn.Module, args: tuple[MetaValue, ...], kwargs: Mapping[str, MetaValue]
    ) -> MetaValue:
        if node.op == "call_module":
            return call_on_meta(root.get_submodule(str(node.target)), *args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]  # of a call_function it is a function


def open_up(model: nn.Module, inputs: dict[str, torch.Tensor], *, closed: Mapping[str, str] | None = None) -> Opened:
    """Returns the traced network.

    Args:
        model: the network.
        inputs: the arguments of forward that are tensors; all others keep their defaults.
        closed: modules that are single operations, with the reason; modules that cannot be traced are added.
    """
    refuse_hooks(model)
    refuse_overridden_call(model, "")
    refuse_strange_tensors({**dict(model.named_parameters()), **dict(model.named_buffers()), **inputs})
    closed = dict(closed or {})
    closed_functions: set[Callable[..., object]] = set()
    signature = inspect.signature(model.forward)
    default_arguments = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name not in inputs and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    is_recurrent = isinstance(model, nn.RNNBase)  # its own forward cannot be traced
    rewrite = REWRITES.get(torch_class_of(model) or type(None)) if is_recurrent else None
    while True:
        tracer = Tracer(closed, inputs, closed_functions)
        random_guard = RefusingRandomNumbers()  # type: ignore[no-untyped-call]  # torch has no annotation here
        try:
            with random_guard, intercepting_torch(), refusing_python_random(), recording_reads(model) as reads:
                program = restoring_attributes(model, partial(_traced, model, tracer, default_arguments, rewrite))
            reads.closed_modules, reads.leaf_modules = frozenset(closed), frozenset(_leaf_modules(program))
            decisions = decisions_of(model, tracer.graph, tracer.decisions)
            return Opened(program, closed, tracer.output_spec, reads, decisions)
        except SpecError:
            raise
        except Exception as error:
            name = next((name for name in reversed(tracer.open_modules) if name not in closed), None)
            if tracer.open_functions:
                closed_functions.add(tracer.open_functions[-1])
            elif name is None:
                return _open_by_export(model, inputs, error)
            else:
                closed[name] = _reason(error)
        finally:
            tracer.forget()


def _leaf_modules(program: fx.GraphModule) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_module"}


def _traced(
    model: nn.Module,
    tracer: Tracer,
    default_arguments: dict[str, object],
    rewrite: Callable[..., object] | None,
) -> fx.GraphModule:
    with forward_of_class(model) if rewrite is None else with_class_forward(model, rewrite):
        graph = tracer.trace(model, concrete_args=default_arguments or None)
        _refuse_unregistered(model, graph)  # fx.GraphModule would register them as buffers
        for node in graph.nodes:
            node.meta.pop("is_wrapped", None)  # fx marks what a function of `fx.wrap` returns, also if it was opened
        return fx.GraphModule(model, graph)


def _refuse_unregistered(model: nn.Module, graph: fx.Graph) -> None:
    registered_ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for node in graph.nodes:
        target = str(node.target)
        if node.op != "get_attr" or is_constant(target):
            continue
        value = operator.attrgetter(target)(model)
        if isinstance(value, torch.Tensor) and id(value) not in registered_ids:
            raise SpecError(
                f"{target!r} is a tensor of the network that is neither a parameter nor a buffer. Use register_buffer."
            )


def _open_by_export(model: nn.Module, inputs: dict[str, torch.Tensor], fx_error: Exception) -> Opened:
    try:
        with intercepting_torch(), refusing_python_random(), recording_reads(model) as reads:
            program, decisions = refusing_stored_tensors(model, partial(exported, model, inputs))
        reads.leaf_modules = frozenset(_leaf_modules(program))
        return Opened(program, {}, None, reads, decisions)
    except Exception as export_error:
        if _reason(fx_error) == _reason(export_error):  # forward itself raises
            raise SpecError(
                f"the forward of {type(model).__name__} was to be traced, but raised "
                f"{type(export_error).__name__}: {_reason(export_error)}. Give an example that it takes."
            ) from fx_error
        raise SpecError(
            f"the forward of {type(model).__name__} was to be traced, but it cannot be: {_reason(fx_error)}; nor by "
            f"torch.export: {_reason(export_error)}. Let it depend on shapes only, not on values, or move that part "
            "into a module of its own: such a module is computed whole on every rank."
        ) from fx_error


def _reason(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def is_tensor_list(value: object) -> TypeGuard[tuple[torch.Tensor, ...] | list[torch.Tensor]]:
    """Whether a value is a list or tuple of tensors only."""
    return isinstance(value, tuple | list) and bool(value) and all(isinstance(item, torch.Tensor) for item in value)
