"""Closures of `optimizer.step`: detects them, and averages their loss over ranks."""

from collections.abc import Callable
from typing import Any


def has_closure(args: Any, kwargs: Any) -> bool:
    """Returns whether `optimizer.step` was given a closure; its first argument is the optimizer."""
    return any(argument is not None for argument in (*args[1:], kwargs.get("closure")))


def with_mean_loss(args: Any, kwargs: Any, mean: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Returns the arguments of `optimizer.step` with closures whose loss is the `mean` over ranks.

    An optimizer may use the loss, as LBFGS does, and ranks that share gradients must use the same value.
    """

    def replaced(value: Any) -> Any:
        return (lambda: mean(value())) if callable(value) else value

    return (args[0], *map(replaced, args[1:])), {key: replaced(value) for key, value in kwargs.items()}
