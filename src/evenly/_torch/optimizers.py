"""Step hooks of torch's optimizers, of one and of all, and the attributes that schedulers set on an optimizer.

The names are the same in torch 2.11 and 2.13.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # attributes of an optimizer
OWN_NOTES = frozenset(
    {"_warned_capturable_if_run_uncaptured"}
)  # set by an optimizer on itself; without effect on its steps
SCHEDULER_NOTES = frozenset({"_opt_called"})  # set by schedulers: whether a step was made

ZERO_GRAD_CODE = frozenset(inspect.unwrap(f).__code__ for f in (Optimizer.zero_grad, nn.Module.zero_grad))


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer supports step hooks; wrappers that only resemble an optimizer do not."""
    return hasattr(optimizer, STEP_HOOKS[0])


def global_step_hooks() -> tuple[Mapping[int, Callable[..., object]], Mapping[int, Callable[..., object]]]:
    """Returns the global hooks before and after the steps of all optimizers, by torch's keys.

    torch has public functions to register and remove them, but none to list them.
    """
    return torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks


def is_scheduler_wrapper(step: Any, optimizer: Optimizer) -> bool:
    """Returns whether `step`, set on an optimizer's instance, is a scheduler's wrapper that counts steps."""
    return hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step
