"""Step hooks of torch's optimizers: those of one, those of all, and what schedulers put on an optimizer.

The names are the same in torch 2.11 and 2.13.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # attributes of an optimizer
OWN_NOTES = frozenset({"_warned_capturable_if_run_uncaptured"})  # of an optimizer for itself: they decide nothing
SCHEDULER_NOTES = frozenset({"_opt_called"})  # of schedulers: whether a step was made


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Returns whether hooks may be put around the steps of an optimizer; wrappers that only look like one have none."""
    return hasattr(optimizer, STEP_HOOKS[0])


def step_hooks_of_all() -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """Returns the hooks before and after the steps of all optimizers, by torch's numbers.

    They are registered and removed in a public way; only to see those of others needs torch's own tables.
    """
    return torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks


def only_counts(step: Any, optimizer: Optimizer) -> bool:
    """Returns whether `step`, found on an optimizer itself, is what a scheduler puts there to count the steps."""
    return hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step
