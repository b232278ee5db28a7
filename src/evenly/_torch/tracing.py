"""What torch.fx and torch.export keep to themselves, and torch's functions that are replaced while a network is traced.

Written for torch 2.11 and 2.13.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import utils as functorch
from torch._subclasses.fake_tensor import FakeTensor

from evenly._torch.patching import replaced
from evenly._torch.pytree import TreeSpec

__all__ = [
    "PROXY_FIELDS",
    "FakeTensor",
    "PlainTracer",
    "constant_name",
    "intercepted",
    "is_constant",
    "is_guard",
    "output_form",
    "reading_attributes",
    "with_class_forward",
]

PROXY_FIELDS = ("node", "tracer", "_root", "root", "attr", "_node", "graph")  # what fx sets on values while it traces

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def constant_name(number: int) -> str:
    """Returns the name that fx gives to the tensor constants of a graph."""
    return f"_tensor_constant{number}"


def is_constant(name: str) -> bool:
    """Returns whether a name is one that fx gives to a tensor that forward makes."""
    return name.startswith("_tensor_constant")


def is_guard(name: str) -> bool:
    """Returns whether a module of an exported graph only checks its inputs."""
    return name.startswith("_guards")


def output_form(graph: fx.Graph) -> TreeSpec:
    """Returns how the outputs of an exported graph are nested; torch.export keeps it with the code it writes."""
    form: TreeSpec = graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]  # of what export makes
    return form


class PlainTracer(fx.Tracer):
    """fx's tracer, in which an argument that is fixed is its value, and no assertion about it is traced."""

    def _proxy_placeholder(self, name: str, concrete_args: Any, sig: Any, fn_for_analysis: Any) -> Any:
        if concrete_args is not None and name in concrete_args:
            return concrete_args[name]  # fx would also assert that nobody gives another value
        return super()._proxy_placeholder(name, concrete_args, sig, fn_for_analysis)


@contextmanager
def intercepted(
    *, apply: Wrap, set_attribute: Wrap, enter_function: Wrap, register_hook: Wrap, is_grad_enabled: Wrap
) -> Iterator[None]:
    """Has functions of torch be others inside of the block, for the whole process; each is made from torch's own.

    Args:
        apply: `torch.autograd.Function.apply`, given as a class method that is not bound yet.
        set_attribute: `nn.Module.__setattr__`.
        enter_function: what every call of an autograd function passes, also `f = F.apply`; it is given its arguments.
        register_hook: `torch.Tensor.register_hook`.
        is_grad_enabled: `torch.is_grad_enabled`.
    """
    function = torch.autograd.Function
    with ExitStack() as stack:
        for owner, name, wrap in (
            (torch.Tensor, "register_hook", register_hook),
            (torch, "is_grad_enabled", is_grad_enabled),
            (functorch, "unwrap_dead_wrappers", enter_function),
            (nn.Module, "__setattr__", set_attribute),
        ):
            stack.enter_context(replaced(owner, name, wrap(getattr(owner, name))))
        stack.enter_context(replaced(function, "apply", classmethod(apply(function.__dict__["apply"]))))
        yield


@contextmanager
def reading_attributes(read: Wrap) -> Iterator[None]:
    """Has `nn.Module.__getattribute__` be what `read` makes of it inside of the block, for the whole process."""
    with replaced(nn.Module, "__getattribute__", read(nn.Module.__getattribute__)):
        yield


@contextmanager
def with_class_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Has a module be of a class with this forward inside of the block: fx traces that of the class."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    try:
        yield
    finally:
        module.__class__ = kind
