"""Closures of `optimizer.step`: detects them, and averages their loss over ranks."""

from collections.abc import Callable, Mapping

Arguments = tuple[tuple[object, ...], dict[str, object]]  # as optimizer hooks get and return them


def has_closure(args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Returns whether `optimizer.step` was given a closure; its first argument is the optimizer."""
    if len(args) == 1 and not kwargs:  # the usual case
        return False
    return any(argument is not None for argument in (*args[1:], kwargs.get("closure")))


def with_mean_loss(
    args: tuple[object, ...], kwargs: Mapping[str, object], mean: Callable[[object], object]
) -> Arguments:
    """Returns the arguments of `optimizer.step` with closures whose loss is the `mean` over ranks.

    An optimizer may use the loss, as LBFGS does, and ranks that share gradients must use the same value.
    """

    def replaced(value: object) -> object:
        return (lambda: mean(value())) if callable(value) else value

    return (args[0], *map(replaced, args[1:])), {key: replaced(value) for key, value in kwargs.items()}
