"""Which functions, operators and modules are torch's: rules apply only to these, not to others of the same name."""

import builtins
import operator
import sys
from collections.abc import Mapping
from functools import cache
from types import BuiltinFunctionType, FunctionType

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from evenly._torch.modules import CALL_METHODS, HARMLESS_METHODS, STATE_METHODS
from evenly._torch.operators import FUNCTIONAL, OpOverload, OpOverloadPacket, operator_name, packet_name
from evenly.errors import SpecError

NAMESPACES = ("aten", "prims")
SAVING = {"state_dict", "load_state_dict", "get_extra_state", "set_extra_state", "train", "eval"} | STATE_METHODS
SAVING |= {"__getstate__", "__setstate__", "__reduce__", "__deepcopy__"}
HARMLESS = {"__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__dict__", "__weakref__"}
HARMLESS |= {"__constants__", "__slots__", "__parameters__", "__orig_bases__", "__repr__", "__str__", "__hash__"}
HARMLESS |= {"__static_attributes__", "__firstlineno__", "__abstractmethods__", "_abc_impl", "__annotate_func__"}
HARMLESS |= {"__annotations_cache__", "__init_subclass__", "__del__", "extra_repr", "reset_parameters"}
HARMLESS |= HARMLESS_METHODS | SAVING
PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


@cache
def _functions() -> frozenset[object]:
    """Returns the functions that rules can refer to by name."""
    namespaces = (torch, F, operator, builtins, torch.special, FUNCTIONAL)
    functions = {value for namespace in namespaces for value in vars(namespace).values() if _is_function(value)}
    return frozenset(functions)


def _is_function(value: object) -> bool:
    return isinstance(value, FunctionType | BuiltinFunctionType) or value is getattr


def is_torch_function(target: object) -> bool:
    """Whether a function or operator is torch's or Python's, or one that this package inserts into graphs."""
    if isinstance(target, OpOverload):
        return target.namespace in NAMESPACES
    if isinstance(target, OpOverloadPacket):
        return packet_name(target).split("::")[0] in NAMESPACES
    try:
        return target in _functions() or str(getattr(target, "__module__", "")).startswith("evenly.graph.")
    except TypeError:  # not hashable, so not a function
        return False


def function_name(target: object) -> str:
    """Returns the short name of torch's functions and operators; the qualified name, without a rule, of others."""
    if isinstance(target, OpOverload):
        name = operator_name(target)
        return name.split("::")[1] if is_torch_function(target) else name
    if isinstance(target, OpOverloadPacket) and not is_torch_function(target):
        return packet_name(target)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or type(target).__name__
    if is_torch_function(target):
        return str(getattr(target, "__name__", name))
    return f"{getattr(target, '__module__', None) or type(target).__module__}:{name}"


def is_torch_class(kind: type) -> bool:
    """Whether a class is torch's and its forward was not replaced."""
    if not kind.__module__.startswith("torch."):
        return False
    defining_module = sys.modules.get(kind.__module__)
    forward = getattr(kind, "forward", None)
    is_original = getattr(defining_module, kind.__qualname__, None) is kind
    return is_original and getattr(forward, "__module__", "").startswith("torch.")


def torch_class_of(module: nn.Module) -> type | None:
    """Returns the torch class whose code a module runs, also for a subclass of it; None if it runs other code.

    Other code is a method overridden by a subclass or set on the instance.
    """
    mro = type(module).__mro__
    kind = next((kind for kind in mro if is_torch_class(kind)), None)
    if kind is None:
        return None
    added = {name for subclass in mro[: mro.index(kind)] for name in vars(subclass)} - HARMLESS
    if any(hasattr(kind, name) for name in added):
        return None
    patched = (name for name, value in vars(module).items() if callable(value) and name not in HARMLESS)
    return None if any(callable(getattr(kind, name, None)) for name in patched) else kind


def module_name(module: nn.Module) -> str:
    """Returns the short name of torch's modules; the qualified name, without a rule, of others."""
    kind = type(module)
    return kind.__name__ if torch_class_of(module) is kind else f"{kind.__module__}:{kind.__qualname__}"


def refuse_overridden_call(module: nn.Module, path: str) -> None:
    """Raises `SpecError` if a module overrides how it is called: a graph of forward would lose that code."""
    for kind in type(module).__mro__:
        overridden = [name for name in CALL_METHODS if name in vars(kind)]
        if overridden and not kind.__module__.startswith("torch."):
            raise SpecError(
                f"{type(module).__name__} at {path or 'the root'!r} was to be traced, but {kind.__name__} overrides "
                f"{overridden[0]}, which a graph of its forward would lose. Move that code into forward."
            )


def refuse_strange_tensors(named: Mapping[str, object]) -> None:
    """Raises `SpecError` for a tensor whose methods may not be torch's: of a subclass, or with patched methods."""
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        kind = type(tensor)
        patched = [key for key in getattr(tensor, "__dict__", ()) if callable(getattr(torch.Tensor, key, None))]
        if kind not in PLAIN_TENSORS or patched:
            case = f"has its own {patched[0]!r}" if patched else f"is a {kind.__module__}.{kind.__qualname__}"
            raise SpecError(
                f"the tensor {name!r} {case}, whose operations may differ from torch's and have no rule. Give a plain "
                "tensor: x.as_subclass(torch.Tensor)."
            )
