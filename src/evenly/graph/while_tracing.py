"""What holds while a network is traced: what a graph would lose is refused, and the network is left as it was."""

import copy
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._functorch import utils as functorch  # private: see keeping_functions
from torch._subclasses.fake_tensor import FakeTensor  # private: what torch.export traces with
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from evenly._errors import SpecError
from evenly.graph.reads import OF_TORCH, is_users
from evenly.graph.shapes import is_random

GLOBAL_HOOKS = (  # torch's private dicts; nothing else tells whether there are any
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
T = TypeVar("T")


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotation here
    """Refuses random numbers drawn while a network is traced: they would be constants, other ones on each rank."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and looks whether it is random and has data."""
        result = func(*args, **(kwargs or {}))
        if is_random(func, args, kwargs or {}):
            made = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            if any(x.device.type != "meta" for x in made):
                raise SpecError(
                    f"forward draws random numbers ({func.__name__}); every rank would draw others. Use dropout, or "
                    "draw them outside and pass them as an input."
                )
        return result


@contextmanager
def keeping_functions() -> Iterator[None]:
    """Lets an autograd function be one operation: fx would follow its forward and forget its backward.

    Refuses that a module keeps what is traced, which would not be a tensor, and hooks on it, which would be lost.
    """
    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        found = next((x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.Proxy)), None)
        own = plain.__get__(None, cls)
        return own(*args, **kwargs) if found is None else found.tracer.create_proxy("call_function", own, args, kwargs)

    kept = nn.Module.__setattr__

    def keep(module: nn.Module, name: str, value: Any) -> None:
        if any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(value)):
            raise fx.proxy.TraceError(f"it keeps a tensor in its attribute {name!r}")
        kept(module, name, value)

    unwrap = functorch.unwrap_dead_wrappers

    def refuse(args: Any) -> Any:
        if any(isinstance(x, fx.Proxy | FakeTensor) for x in pytree.tree_leaves(args)):
            raise fx.proxy.TraceError("it calls an autograd function, whose backward would be lost, by another name")
        return unwrap(args)

    hooked = torch.Tensor.register_hook

    def hook(x: torch.Tensor, *args: Any) -> Any:
        if isinstance(x, FakeTensor):
            raise fx.proxy.TraceError("it puts a hook on a tensor")
        return hooked(x, *args)  # type: ignore[no-untyped-call]  # torch has no annotation here

    asked, thread = torch.is_grad_enabled, threading.get_ident()

    def ask() -> bool:
        if threading.get_ident() == thread and is_users(sys._getframe(1).f_globals):  # private: who asks
            raise fx.proxy.TraceError("it asks whether gradients are computed, which differs from call to call")
        return asked()

    torch.Tensor.register_hook = hook  # type: ignore[method-assign]  # for a while
    torch.is_grad_enabled = ask
    functorch.unwrap_dead_wrappers = refuse  # what every call of an autograd function passes, also `f = F.apply`
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]  # for a while
    nn.Module.__setattr__ = keep  # type: ignore[method-assign, assignment]  # for a while
    try:
        yield
    finally:
        torch.Tensor.register_hook = hooked  # type: ignore[method-assign]  # as it was
        functorch.unwrap_dead_wrappers = unwrap
        torch.is_grad_enabled = asked
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]  # as it was
        nn.Module.__setattr__ = kept  # type: ignore[method-assign]  # as it was


@contextmanager
def forward_of_class(model: nn.Module) -> Iterator[None]:
    """Lets a forward that was put into the instance be the class's for a while: fx traces that of the class."""
    patched, kind = vars(model).get("forward"), type(model)
    if patched is None:
        yield
        return
    parameters = inspect.signature(patched).parameters.values()
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
        raise SpecError(
            f"the forward that was put into this {kind.__name__} takes arguments that are not plain ones. Write it as "
            "the forward of a subclass."
        )
    names = ", ".join(p.name for p in parameters)
    scope: dict[str, Any] = {"_patched": patched}
    exec(f"def forward(self, {names}):\n    return _patched({names})", scope)  # noqa: S102  # names of arguments only
    model.__class__ = type(kind.__name__, (kind,), {"forward": scope["forward"], "__module__": kind.__module__})
    try:
        yield
    finally:
        model.__class__ = kind


@contextmanager
def without_chance() -> Iterator[None]:
    """Refuses numbers that forward draws with Python or numpy: what was drawn while tracing would stay for ever."""

    def states() -> list[Any]:
        numpy = sys.modules.get("numpy")
        return [random.getstate(), repr(numpy.random.get_state()) if numpy is not None else None]

    before = states()
    yield
    if states() != before:
        raise SpecError(
            "forward draws random numbers with Python's random or numpy; every rank would draw others. Use dropout, or "
            "draw them outside and pass them as an input."
        )


def forgetting(model: nn.Module, make: Callable[[], fx.GraphModule]) -> fx.GraphModule:
    """Returns what is made; the network is left as it was, also where its forward notes something in itself."""
    before = {module: _noted(module) for module in model.modules()}
    try:
        made = make()
    finally:
        for name in [name for name in vars(model) if name.startswith("_tensor_constant")]:
            delattr(model, name)
        changed = [(module, key) for module in before for key in _restore(module, before[module])]
    if changed:
        module, key = changed[0]
        raise SpecError(
            f"forward of {type(module).__name__} changes its attribute {key!r}, which a network whose layers are cut "
            "would not do. Keep such notes outside of forward."
        )
    return made


def keeping_nothing(model: nn.Module, make: Callable[[], T]) -> T:
    """Returns what is made with torch.export; refuses that forward keeps a tensor in a module, which has no data."""
    before = {module: dict(vars(module)) for module in model.modules()}
    made = make()
    for module, held in before.items():
        for key, value in list(vars(module).items()):
            if key not in OF_TORCH and any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value)):
                vars(module).pop(key)
                vars(module).update({key: held[key]} if key in held else {})
                raise SpecError(
                    f"forward of {type(module).__name__} keeps a tensor in its attribute {key!r}, which a network "
                    "whose layers are cut would not do. Return it beside the output"
                )
    return made


def _noted(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module, with copies of those that can be added to."""
    return {key: copy.copy(value) if type(value) in (list, dict, set) else value for key, value in vars(module).items()}


def _restore(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Brings a module's attributes back, and returns which had changed."""
    now = vars(module)
    changed = [key for key in now if key not in before or not _same(now[key], before[key])]
    changed += [key for key in before if key not in now]
    for key in changed:
        if type(now.get(key)) in (list, dict, set) and type(now[key]) is type(before.get(key)):
            now[key].clear()
            now[key].extend(before[key]) if isinstance(now[key], list) else now[key].update(before[key])
        elif key in before:
            now[key] = before[key]
        else:
            del now[key]
    return changed


def _same(now: Any, before: Any) -> bool:
    if type(now) is not type(before):
        return False
    if isinstance(now, list):
        return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
    if isinstance(now, dict):
        return list(now) == list(before) and all(now[key] is before[key] for key in now)
    return now is before or (isinstance(now, int | float | str | set) and bool(now == before))


def refuse_hooks_on_all() -> None:
    """Raises `SpecError` if there are hooks on all modules of the process: a cut network does not call its modules."""
    for kind in GLOBAL_HOOKS:
        for hook in list(getattr(nn.modules.module, kind).values()):
            if is_users({"__name__": getattr(hook, "__module__", None) or "torch"}):  # torch.export has its own
                raise SpecError(
                    f"a hook on all modules is registered ({kind} of torch.nn.modules.module), but a network whose "
                    "layers are cut over ranks does not call its modules. Remove it before sharding, and keep it out."
                )


def refuse_hooks(model: nn.Module) -> None:
    """Raises `SpecError` if a module has hooks: they would see parts of tensors."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, module in model.named_modules():
        found = [kind.strip("_").replace("_", " ") for kind in kinds if getattr(module, kind, None)]
        if found:
            raise SpecError(
                f"the module {name or type(model).__name__!r} has {found[0]}, which would see parts of tensors once "
                "its layers are cut. Remove them before sharding; the parametrizations of torch.nn.utils do work."
            )
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise SpecError(
                f"the parameter {name!r} has a gradient hook, which would see a part of the gradient once the "
                "parameter is cut. Remove it before sharding."
            )
