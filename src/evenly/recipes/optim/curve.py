"""A schedule that follows a curve."""

from collections.abc import Callable
from typing import Any, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@final
class CurveSchedule(LRScheduler):
    """Sets the learning rate to `factor(steps made)` times the optimizer's own, and the momentum to `momentum(...)`.

    Both are functions of the number of steps alone, and not part of `state_dict()`.
    """

    def __init__(
        self, optimizer: Optimizer, factor: Callable[[int], float], momentum: Callable[[int], float] | None = None
    ) -> None:
        self._factor = factor
        self._momentum = momentum
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]  # torch's also allows tensors
        """Returns the learning rate of each group."""
        return [float(lr) * self._factor(self.last_epoch) for lr in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Counts a step and sets the values of the next one."""
        super().step(epoch)
        if self._momentum is not None:
            for group in self.optimizer.param_groups:
                set_momentum(group, self._momentum(self.last_epoch))

    def state_dict(self) -> dict[str, Any]:
        """Returns what a run that resumes needs."""
        return {key: value for key, value in super().state_dict().items() if key not in ("_factor", "_momentum")}


def has_momentum(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer has a momentum, or a first beta, above 0."""
    return any(_momentum_of(group) for group in optimizer.param_groups)


def set_momentum(group: dict[str, Any], momentum: float) -> None:
    """Sets the momentum, or the first beta, of a group that has one above 0."""
    if not _momentum_of(group):
        return
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])
    else:
        group["momentum"] = momentum


def _momentum_of(group: dict[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
