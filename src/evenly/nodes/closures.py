"""What stands between a loop and `optimizer.step`: closures, and GradScalers that leave steps out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True)
class _Watcher:
    """Who wants to know of steps that a GradScaler leaves out."""

    optimizer: torch.optim.Optimizer
    steps: Callable[[], int]
    on_skip: Callable[[], None]


class _WatchedStep:
    """Stands for `scaler.step`, once for all optimizers that are watched on one scaler."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._plain = scaler.step
        self._is_patched = "step" in vars(scaler)  # by somebody before
        self.watchers: list[_Watcher] = []

    def __call__(self, stepped: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        watchers = [watcher for watcher in self.watchers if watcher.optimizer is stepped]
        before = [watcher.steps() for watcher in watchers]
        result = self._plain(stepped, *args, **kwargs)
        for watcher, number in zip(watchers, before, strict=True):
            if watcher.steps() == number:
                watcher.on_skip()
        return result

    def remove(self, watcher: _Watcher, scaler: torch.amp.GradScaler) -> None:
        """Forgets a watcher; behind the last one `scaler.step` is what it was, unless somebody has replaced it."""
        if watcher in self.watchers:
            self.watchers.remove(watcher)
        if not self.watchers and vars(scaler).get("step") is self:
            if self._is_patched:
                scaler.step = self._plain  # type: ignore[method-assign]  # as it was found
            else:
                del scaler.step


def watch_scaler(
    scaler: torch.amp.GradScaler | None,
    optimizer: torch.optim.Optimizer,
    *,
    steps: Callable[[], int],
    on_skip: Callable[[], None],
) -> Callable[[], None]:
    """Calls `on_skip` whenever `scaler` leaves out a step of `optimizer`, of which `steps` says how many were made.

    Returns what ends it.
    """
    if scaler is None:
        return lambda: None
    watched = vars(scaler).get("step")
    if not isinstance(watched, _WatchedStep):
        watched = _WatchedStep(scaler)
        scaler.step = watched  # type: ignore[method-assign, assignment]  # on this one scaler, as torch's schedulers do
    watcher = _Watcher(optimizer, steps, on_skip)
    watched.watchers.append(watcher)
    return partial(watched.remove, watcher, scaler)
