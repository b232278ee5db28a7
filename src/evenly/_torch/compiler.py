"""Functions that torch.compile leaves as they are."""

from torch._compile import _disable_dynamo

__all__ = ["disable_compile"]

disable_compile = _disable_dynamo
"""Marks a function that torch.compile calls as it is.

`torch.compiler.disable` says the same, but loads the compiler at once, which takes a second; this loads it at the first
call inside of it. torch.optim uses it in the same way (torch 2.11 and 2.13).
"""
