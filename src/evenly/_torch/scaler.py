"""torch's GradScaler: who is told of steps that it leaves out, and ranks that agree on what is not finite.

Written for torch 2.11 and 2.13.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch


class AgreeingScaler(torch.amp.GradScaler):
    """A GradScaler that asks `agreed` what to make of the flags for gradients that are not finite."""

    def agreed(self, optimizer: torch.optim.Optimizer, flags: dict[torch.device, Any]) -> dict[torch.device, Any]:
        """Returns the flags, one for each device, by which a step is left out; a subclass overrides it."""
        return flags

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, Any]:
        """Is what makes the flags; its name is private, but `unscale_` and `step` both go through it."""
        flags: dict[torch.device, Any] = super()._unscale_grads_(optimizer, *args, **kwargs)
        return self.agreed(optimizer, flags)


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

    A scaler that leaves a step out does not call the optimizer, and tells nobody: `step` is replaced on this one
    scaler, as torch's schedulers do with optimizers. Returns what ends it; `scaler.step` is then torch's again.
    """
    if scaler is None:
        return lambda: None
    watched = vars(scaler).get("step")
    if not isinstance(watched, _WatchedStep):
        watched = _WatchedStep(scaler)
        scaler.step = watched  # type: ignore[method-assign, assignment]  # on this one scaler
    watcher = _Watcher(optimizer, steps, on_skip)
    watched.watchers.append(watcher)
    return partial(watched.remove, watcher, scaler)
