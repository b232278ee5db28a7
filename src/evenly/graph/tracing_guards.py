"""Guards for tracing: they refuse what a graph would lose, and leave the network unchanged."""

import copy
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx, nn

from evenly._torch import pytree
from evenly._torch.autograd import has_hooks
from evenly._torch.modules import HOOKS, buffer_table, global_module_hooks
from evenly._torch.operators import OpOverload, TorchDispatchMode
from evenly._torch.tracing import FakeTensor, intercepted, is_constant, with_class_forward
from evenly.errors import SpecError
from evenly.graph.inserted import assign, cannot_hold, is_in_place
from evenly.graph.reads import MODULE_ATTRIBUTES, is_user_code
from evenly.graph.shapes import is_random

T = TypeVar("T")


class RefusingRandomNumbers(TorchDispatchMode):
    """Refuses random numbers drawn while a network is traced: they would be constants that differ between ranks."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Runs an operation; raises if it is random and its result has data."""
        result = func(*args, **(kwargs or {}))
        if is_random(func, args, kwargs or {}):
            tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            if any(x.device.type != "meta" for x in tensors):
                raise SpecError(
                    f"forward draws random numbers ({func.__name__}); ranks would draw different ones. Use dropout, "
                    "or draw them outside and pass them as an input."
                )
        return result


@contextmanager
def intercepting_torch() -> Iterator[None]:
    """Traces an autograd function as one operation: fx would trace its forward and lose its backward.

    Refuses traced values stored in modules, hooks on traced tensors, and branches on whether gradients are computed.
    """
    thread = threading.get_ident()

    def record_autograd_function(plain: "classmethod[object, ..., object]") -> Callable[..., object]:
        def apply(cls: type[torch.autograd.Function], *args: object, **kwargs: object) -> object:
            proxy = next((x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.Proxy)), None)
            bound_apply = plain.__get__(None, cls)
            if proxy is None:
                return bound_apply(*args, **kwargs)
            return proxy.tracer.create_proxy("call_function", bound_apply, args, kwargs)

        return apply

    def refuse_traced_attribute(plain: Callable[..., object]) -> Callable[..., object]:
        def set_attribute(module: nn.Module, name: str, value: object) -> None:
            if isinstance(value, fx.Proxy) and name in buffer_table(module):
                _assign_buffer(module, name, value)
                return
            if any(isinstance(leaf, fx.Proxy) and _uses_inputs(leaf) for leaf in pytree.tree_leaves(value)):
                raise fx.proxy.TraceError(f"it keeps a tensor in its attribute {name!r}")
            plain(module, name, value)

        return set_attribute

    def refuse_hidden_autograd_function(plain: Callable[..., object]) -> Callable[..., object]:
        def enter_function(args: object) -> object:
            if any(isinstance(x, fx.Proxy | FakeTensor) for x in pytree.tree_leaves(args)):
                raise fx.proxy.TraceError(
                    "it calls an autograd function, whose backward would be lost, by another name"
                )
            return plain(args)

        return enter_function

    def refuse_tensor_hook(plain: Callable[..., object]) -> Callable[..., object]:
        def register_hook(x: torch.Tensor, *args: object) -> object:
            if isinstance(x, FakeTensor):
                raise fx.proxy.TraceError("it puts a hook on a tensor")
            return plain(x, *args)

        return register_hook

    def refuse_grad_mode_query(plain: Callable[..., object]) -> Callable[..., object]:
        def is_grad_enabled() -> object:
            caller_globals = sys._getframe(1).f_globals  # private, but there is no public access
            if threading.get_ident() == thread and is_user_code(caller_globals):
                raise fx.proxy.TraceError("it asks whether gradients are computed, which differs from call to call")
            return plain()

        return is_grad_enabled

    with intercepted(
        apply=record_autograd_function,
        set_attribute=refuse_traced_attribute,
        enter_function=refuse_hidden_autograd_function,
        register_hook=refuse_tensor_hook,
        is_grad_enabled=refuse_grad_mode_query,
    ):
        yield


def _assign_buffer(module: nn.Module, name: str, value: fx.Proxy) -> None:
    """Records that a traced value becomes a buffer; `self.count += 1` has changed it in place already."""
    buffer = getattr(module, name)  # traced
    if not isinstance(buffer, fx.Proxy):
        raise fx.proxy.TraceError(f"it keeps a tensor in its attribute {name!r}")
    if not is_in_place(value.node, buffer.node):
        reason = cannot_hold(buffer_table(module)[name], value.tracer.for_example(value))  # type: ignore[attr-defined]  # our tracer
        if reason:
            raise fx.proxy.TraceError(f"it sets the buffer {name!r} to {reason}")
        value.tracer.create_proxy("call_function", assign, (buffer, value), {})


@contextmanager
def forward_of_class(model: nn.Module) -> Iterator[None]:
    """Makes a forward that was set on the instance the class's while tracing: fx traces the class's forward."""
    patched, kind = vars(model).get("forward"), type(model)
    if patched is None:
        yield
        return
    parameters = inspect.signature(patched).parameters.values()
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
        raise SpecError(
            f"the forward that was set on this {kind.__name__} has arguments that are not both positional and keyword "
            "ones. Write it as the forward of a subclass."
        )
    names = ", ".join(p.name for p in parameters)
    scope: dict[str, Callable[..., object]] = {"_patched": patched}
    exec(f"def forward(self, {names}):\n    return _patched({names})", scope)  # noqa: S102  # names of arguments only
    with with_class_forward(model, scope["forward"]):
        yield


@contextmanager
def refusing_python_random() -> Iterator[None]:
    """Refuses numbers that forward draws with Python or numpy: a graph would keep them as constants."""

    def states() -> list[object]:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return [random.getstate()]
        state = numpy.random.get_state(legacy=False)
        if state["bit_generator"] != "MT19937":  # the default, whose array takes long to print
            return [random.getstate(), repr(state)]
        return [random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"], state["gauss"]]

    before = states()
    yield
    if states() != before:
        raise SpecError(
            "forward draws random numbers with Python's random or numpy; ranks would draw different ones. Use "
            "dropout, or draw them outside and pass them as an input."
        )


def restoring_attributes(model: nn.Module, make: Callable[[], fx.GraphModule]) -> fx.GraphModule:
    """Returns `make()` and restores the network's attributes; refuses a forward that changes them, except caches."""
    before = {module: _attributes_of(module) for module in model.modules()}
    try:
        program = make()
    finally:
        for name in [name for name in vars(model) if is_constant(name)]:
            delattr(model, name)
        changed = [(module, key) for module in before for key in _restore(module, before[module])]
    if changed:
        module, key = changed[0]
        raise SpecError(
            f"forward of {type(module).__name__} changes its attribute {key!r}, which a network whose layers are cut "
            "would not do. Keep such state outside of forward."
        )
    return program


def refusing_stored_tensors(model: nn.Module, make: Callable[[], T]) -> T:
    """Returns `make()`, which uses torch.export; refuses a forward that stores a fake tensor in a module."""
    before = {module: dict(vars(module)) for module in model.modules()}
    result = make()
    for module, attributes_before in before.items():
        for key, value in list(vars(module).items()):
            if key not in MODULE_ATTRIBUTES and any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value)):
                vars(module).pop(key)
                vars(module).update({key: attributes_before[key]} if key in attributes_before else {})
                raise SpecError(
                    f"forward of {type(module).__name__} keeps a tensor in its attribute {key!r}, which a network "
                    "whose layers are cut would not do. Return it with the output"
                )
    return result


def _attributes_of(module: nn.Module) -> dict[str, object]:
    """Returns the attributes of a module, with copies of lists, dicts and sets."""
    return {key: copy.copy(value) if type(value) in (list, dict, set) else value for key, value in vars(module).items()}


def _restore(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Restores a module's attributes and returns the names of those that had changed, without caches."""
    attributes = vars(module)
    changed = [key for key in attributes if key not in before or not _is_same(attributes[key], before[key])]
    changed += [key for key in before if key not in attributes]
    caches = [key for key in changed if _is_cache(attributes.get(key), before.get(key))]
    for key in changed:
        if type(attributes.get(key)) in (list, dict, set) and type(attributes[key]) is type(before.get(key)):
            container = attributes[key]
            container.clear()
            container.extend(before[key]) if isinstance(container, list) else container.update(before[key])
        elif key in before:
            attributes[key] = before[key]
        else:
            del attributes[key]
    return [key for key in changed if key not in caches]


def _is_cache(now: object, before: object) -> bool:
    """Whether forward only added tensors that do not depend on its inputs: computed anew, they are the same."""
    if isinstance(now, dict) and isinstance(before, dict):
        if any(key not in now or now[key] is not before[key] for key in before):
            return False
        added: object = [value for key, value in now.items() if key not in before]
    elif before is None:
        added = now
    else:
        return False
    leaves = pytree.tree_leaves(added)
    return bool(leaves) and all(
        not _uses_inputs(leaf) if isinstance(leaf, fx.Proxy) else isinstance(leaf, torch.Tensor) for leaf in leaves
    )


def _uses_inputs(proxy: fx.Proxy) -> bool:
    """Whether a traced value is computed from an input of the network."""
    pending, visited = [proxy.node], {proxy.node}
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            return True
        pending += [n for n in node.all_input_nodes if n not in visited]
        visited |= set(pending)
    return False


def _is_same(now: object, before: object) -> bool:
    if type(now) is not type(before):
        return False
    if isinstance(now, list) and isinstance(before, list):
        return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
    if isinstance(now, dict) and isinstance(before, dict):
        return list(now) == list(before) and all(now[key] is before[key] for key in now)
    return now is before or (isinstance(now, int | float | str | set) and bool(now == before))


def refuse_global_hooks() -> None:
    """Raises `SpecError` if there are global module hooks: a cut network does not call its modules."""
    for kind, hook in global_module_hooks():
        module_name = getattr(hook, "__module__", None) or "torch"
        if is_user_code({"__name__": module_name}):  # torch.export registers some itself
            raise SpecError(
                f"a hook on all modules is registered ({kind} of torch.nn.modules.module), but a network whose layers "
                "are cut over ranks does not call its modules. Remove it before sharding."
            )


def refuse_hooks(model: nn.Module) -> None:
    """Raises `SpecError` if a module has hooks: they would see parts of tensors."""
    for name, module in model.named_modules():
        hook_names = [kind.strip("_").replace("_", " ") for kind in HOOKS if getattr(module, kind, None)]
        if hook_names:
            raise SpecError(
                f"the module {name or type(model).__name__!r} has {hook_names[0]}, which would see parts of tensors "
                "once its layers are cut. Remove them before sharding; the parametrizations of torch.nn.utils do work."
            )
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise SpecError(
                f"the parameter {name!r} has a gradient hook, which would see a part of the gradient once the "
                "parameter is cut. Remove it before sharding."
            )
