"""Excludes functions from torch.compile, and finds the modules and names inside of compiled networks.

The class OptimizedModule with its child `_orig_mod`, and the attribute that `nn.Module.compile` sets, are the same in
torch 2.11 and 2.13; torch's DDP and FSDP use them too.
"""

import sys

from torch import nn
from torch._compile import _disable_dynamo

__all__ = ["COMPILED_CALL", "Uncompiled", "disable_compile", "leave_uncompiled", "plain_name", "uncompiled"]

COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module on which `compile()` was called: what runs in place of its forward."""

COMPILED = "_orig_mod"
"""The child in which `torch.compile(module)` keeps the module."""

disable_compile = _disable_dynamo
"""Decorates a function that torch.compile calls without tracing it.

`torch.compiler.disable` does the same, but imports the compiler at once, which takes a second; this imports it at the
first call. torch.optim uses it in the same way (torch 2.11 and 2.13).
"""


def leave_uncompiled(*packages: str) -> None:
    """Has torch.compile call functions of these packages and of this one untraced, and compile what they call.

    A decorator for one function would leave out the network that it calls, too, or compile every other function that
    it calls by itself. The list is private (torch 2.11 and 2.13); it holds all packages of torch that are so called.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is None:
        return  # every optimizer loads the compiler when it is made: nothing has been compiled
    for package in (*packages, __package__):
        folder = rules._module_dir(sys.modules[package])
        if folder not in rules.SKIP_DIRS:
            rules.add(package)


def plain_name(name: str) -> str:
    """Returns the name that a tensor or module has in the network before torch.compile.

    >>> plain_name("_orig_mod.block._orig_mod.weight"), plain_name("_orig_mod")
    ('block.weight', '')
    """
    return ".".join(part for part in name.split(".") if part != COMPILED)


def uncompiled(module: nn.Module) -> nn.Module:
    """Returns the module that `torch.compile` was given; any other module as it is."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # not loaded: nothing was compiled
    if eval_frame is None or not isinstance(module, eval_frame.OptimizedModule):
        return module
    original: nn.Module = module.get_submodule(COMPILED)
    return original


class Uncompiled(nn.Module):
    """The copy of a compiled module in a cut network: its child keeps its name, and is called as it is."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """Returns the child's outputs."""
        return self.get_submodule(COMPILED)(*args, **kwargs)
