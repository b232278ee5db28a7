"""Excludes functions from torch.compile, and names the tensors of compiled modules as those of plain ones."""

from torch._compile import _disable_dynamo

__all__ = ["disable_compile", "plain_name"]

disable_compile = _disable_dynamo
"""Decorates a function that torch.compile calls without tracing it.

`torch.compiler.disable` does the same, but imports the compiler at once, which takes a second; this imports it at the
first call. torch.optim uses it in the same way (torch 2.11 and 2.13).
"""

COMPILED = "_orig_mod"  # the child in which torch.compile(module) keeps the module (torch 2.0 to 2.13)


def plain_name(name: str) -> str:
    """Returns the name that a tensor or module has in the network before torch.compile.

    >>> plain_name("_orig_mod.block._orig_mod.weight"), plain_name("_orig_mod")
    ('block.weight', '')
    """
    return ".".join(part for part in name.split(".") if part != COMPILED)
