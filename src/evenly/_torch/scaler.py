"""torch's GradScaler: callbacks for skipped steps, and flags for non-finite gradients that ranks agree on.

Written for torch 2.11 and 2.13.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

Flags = dict[torch.device, torch.Tensor]  # for each device: 1 if a gradient there is not finite, else 0


class AgreeingScaler(torch.amp.GradScaler):
    """A GradScaler that passes its flags for non-finite gradients through `agreed`."""

    def agreed(self, optimizer: torch.optim.Optimizer, flags: Flags) -> Flags:
        """Returns the flags, one for each device, that decide whether a step is skipped; a subclass overrides it."""
        return flags

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> Flags:
        """Computes the flags; its name is private, but both `unscale_` and `step` call it."""
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return self.agreed(optimizer, flags)


@dataclass(frozen=True)
class _Watcher:
    """A callback for the steps of an optimizer that a GradScaler skips."""

    optimizer: torch.optim.Optimizer
    steps: Callable[[], int]
    on_skip: Callable[[], None]


class _WatchedStep:
    """Replaces `scaler.step`, once for all optimizers that are watched on one scaler."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._plain = scaler.step
        self._is_patched = "step" in vars(scaler)  # by other code, before
        self.watchers: list[_Watcher] = []

    def __call__(self, stepped: torch.optim.Optimizer, *args: object, **kwargs: object) -> float | None:
        watchers = [watcher for watcher in self.watchers if watcher.optimizer is stepped]
        before = [watcher.steps() for watcher in watchers]
        result = self._plain(stepped, *args, **kwargs)
        for watcher, number in zip(watchers, before, strict=True):
            if watcher.steps() == number:
                watcher.on_skip()
        return result

    def remove(self, watcher: _Watcher, scaler: torch.amp.GradScaler) -> None:
        """Removes a watcher; the last one restores `scaler.step`, unless other code has replaced it."""
        if watcher in self.watchers:
            self.watchers.remove(watcher)
        if not self.watchers and vars(scaler).get("step") is self:
            if self._is_patched:
                scaler.step = self._plain  # type: ignore[method-assign]  # as it was before
            else:
                del scaler.step


def watch_scaler(
    scaler: torch.amp.GradScaler | None,
    optimizer: torch.optim.Optimizer,
    *,
    steps: Callable[[], int],
    on_skip: Callable[[], None],
) -> Callable[[], None]:
    """Calls `on_skip` whenever `scaler` skips a step of `optimizer`; `steps` returns the number of steps so far.

    A scaler that skips a step does not call the optimizer and has no callback, so `step` is replaced on this one
    scaler, as torch's schedulers do with optimizers. Returns a function that ends this and restores `scaler.step`.
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
