"""Calls of a module that go elsewhere.

`Module.__call__` looks for `_compiled_call_impl` on the instance first, which `Module.compile()` sets; a hook or a
replaced `forward` would run the module's own hooks twice. torch leaves the attribute out of copies and pickles. The
name is the same in torch 2.11 and 2.13.
"""

from collections.abc import Callable
from typing import Any

import torch


class _Redirect:
    """Stands in for the compiled call of one module; while the target runs, the module is as it was."""

    def __init__(self, module: torch.nn.Module, target: Callable[..., Any]) -> None:
        self._module, self._target = module, target
        self._before = module._compiled_call_impl

    def __call__(self, *args: object, **kwargs: object) -> Any:
        self._module._compiled_call_impl = self._before
        try:
            return self._target(*args, **kwargs)
        finally:
            self._module._compiled_call_impl = self

    def undo(self) -> None:
        """Makes the module the one that is called again, unless something else was put in place since."""
        if vars(self._module).get("_compiled_call_impl") is self:
            self._module._compiled_call_impl = self._before


def redirect_calls(module: torch.nn.Module, target: Callable[..., Any]) -> Callable[[], None]:
    """Lets each call of `module` call `target`, which may call the module itself; returns a function that undoes it."""
    redirect = _Redirect(module, target)
    module._compiled_call_impl = redirect
    return redirect.undo
