"""Private parts of torch.fx and torch.export, and patches of torch functions while a network is traced.

Written for torch 2.11 and 2.13.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

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
    "output_spec",
    "reading_attributes",
    "with_class_forward",
]

PROXY_FIELDS = (
    "node",
    "tracer",
    "_root",
    "root",
    "attr",
    "_node",
    "graph",
)  # attributes that fx sets on values while it traces

Wrap = Callable[[Callable[..., object]], Callable[..., object]]  # maps a function of torch to its replacement


def constant_name(number: int) -> str:
    """Returns the name that fx gives to a tensor constant of a graph."""
    return f"_tensor_constant{number}"


def is_constant(name: str) -> bool:
    """Returns whether a name is one that fx gives to a tensor that forward creates."""
    return name.startswith("_tensor_constant")


def is_guard(name: str) -> bool:
    """Returns whether a module of an exported graph only checks its inputs."""
    return name.startswith("_guards")


def output_spec(graph: fx.Graph) -> TreeSpec:
    """Returns the structure of the outputs of an exported graph; torch.export stores it with the generated code."""
    spec: TreeSpec = graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]  # set by torch.export
    return spec


class PlainTracer(fx.Tracer):
    """fx's tracer, which replaces a fixed argument by its value and traces no assertion about it."""

    def _proxy_placeholder(
        self,
        name: str,
        concrete_args: dict[str, object] | None,
        sig: inspect.Signature,
        fn_for_analysis: Callable[..., object],
    ) -> object:
        if concrete_args is not None and name in concrete_args:
            return concrete_args[name]  # fx would also trace an assertion on the value
        return super()._proxy_placeholder(name, concrete_args, sig, fn_for_analysis)


@contextmanager
def intercepted(
    *,
    apply: "Callable[[classmethod[object, ..., object]], Callable[..., object]]",
    set_attribute: Wrap,
    enter_function: Wrap,
    register_hook: Wrap,
    is_grad_enabled: Wrap,
) -> Iterator[None]:
    """Replaces functions of torch inside the block, for the whole process; each argument wraps torch's own.

    Args:
        apply: wraps `torch.autograd.Function.apply`, passed as an unbound class method.
        set_attribute: wraps `nn.Module.__setattr__`.
        enter_function: wraps a function that every call of an autograd function, also by `f = F.apply`, runs on its
            arguments.
        register_hook: wraps `torch.Tensor.register_hook`.
        is_grad_enabled: wraps `torch.is_grad_enabled`.
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
    """Replaces `nn.Module.__getattribute__` by `read` of it inside the block, for the whole process."""
    with replaced(nn.Module, "__getattribute__", read(nn.Module.__getattribute__)):
        yield


@contextmanager
def with_class_forward(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Gives a module a subclass with this forward inside the block: fx traces the forward of the class."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    try:
        yield
    finally:
        module.__class__ = kind
