"""What stands between a loop and `optimizer.step`: closures, and GradScalers that leave steps out."""

from collections.abc import Callable
from typing import Any

import torch


def has_closure(args: Any, kwargs: Any) -> bool:
    """Returns whether `optimizer.step` was given a closure; its first argument is the optimizer."""
    return any(argument is not None for argument in (*args[1:], kwargs.get("closure")))


def with_mean_loss(args: Any, kwargs: Any, mean: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Returns the arguments of `optimizer.step` with closures whose loss is the `mean` over ranks.

    An optimizer may decide by the loss, as LBFGS does, and ranks that share gradients must decide alike.
    """

    def replaced(value: Any) -> Any:
        return (lambda: mean(value())) if callable(value) else value

    return (args[0], *map(replaced, args[1:])), {key: replaced(value) for key, value in kwargs.items()}


def watch_scaler(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    *,
    steps: Callable[[], int],
    on_skip: Callable[[], None],
) -> None:
    """Calls `on_skip` whenever `scaler` leaves out a step of `optimizer`, of which `steps` says how many were made."""
    plain = scaler.step

    def step(stepped: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        before = steps()
        result = plain(stepped, *args, **kwargs)
        if stepped is optimizer and steps() == before:
            on_skip()
        return result

    scaler.step = step  # type: ignore[method-assign, assignment]  # on this one scaler, as torch's schedulers do with optimizers
