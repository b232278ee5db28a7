"""Excludes functions from torch.compile."""

from torch._compile import _disable_dynamo

__all__ = ["disable_compile"]

disable_compile = _disable_dynamo
"""Decorates a function that torch.compile calls without tracing it.

`torch.compiler.disable` does the same, but imports the compiler at once, which takes a second; this imports it at the
first call. torch.optim uses it in the same way (torch 2.11 and 2.13).
"""
