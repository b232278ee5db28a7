"""Steps with a closure, as trainers make them, become plain steps."""

import inspect
from collections.abc import Callable

import torch

from evenly.nodes.closures import Arguments, has_closure


def run_closures_first(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Runs the closure of `optimizer.step(closure)` before the step; returns a function that ends this.

    A trainer puts forward and backward into the closure. With them done before, the gradients are checked before the
    step, and no loss has to be averaged. An optimizer that cannot step without a closure (LBFGS) gets it. To be
    called before the optimizer's model is synchronized: hooks run in the order in which they were registered.
    """
    argument = inspect.signature(type(optimizer).step).parameters.get("closure")
    if argument is None or argument.default is inspect.Parameter.empty:
        return lambda: None
    return optimizer.register_step_pre_hook(_run_closure).remove


def _run_closure(
    optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> Arguments | None:
    if not has_closure(args, kwargs):
        return None
    closures = [value for value in (*args[1:], kwargs.get("closure")) if callable(value)]
    with torch.enable_grad():
        for closure in closures:
            closure()
    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (args[0], *(value for value in args[1:] if not callable(value))), rest
