"""What only autograd's engine knows: which backward runs, what it will reach, and when it ends.

torch.autograd.graph and torch's DDP use the same names of torch._C, of torch 2.11 and 2.13.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad

NO_BACKWARD = -1
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # the dicts that the engine reads

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Returns how often a tensor was changed in place. Autograd counts it; there is no public way to ask."""


def backward_number() -> int:
    """Returns the number of the backward that runs on this thread, `NO_BACKWARD` without one.

    It tells two backwards apart, also one that an activation checkpoint runs inside another.
    """
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Returns whether autograd runs a backward on this thread; activation checkpoints run forwards in it."""
    return bool(torch._C._current_graph_task_id() != NO_BACKWARD)


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Has the running backward call `act` when all gradients are there, behind what was queued before.

    DDP and FSDP end their backwards in the same way. The engine forgets the queue with the backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(act)


def will_reach(parameter: torch.Tensor) -> bool:
    """Returns whether the running backward gives this parameter a gradient; autograd.grad() gives none."""
    with torch.enable_grad():
        view = parameter.view_as(parameter).grad_fn  # the public way to the node that adds to a parameter's gradient
    node = view.next_functions[0][0] if view is not None else None
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # in autograd.grad()
        return False


def next_operation() -> int:
    """Returns the number that autograd gives to the next operation of this thread, as torch's profiler shows it."""
    if torch.compiler.is_compiling():  # it cannot trace what follows, and warns
        return 0
    return int(torch._C._autograd._get_sequence_nr())


def operation_of(tensor: torch.Tensor) -> int:
    """Returns the number of the operation that made a tensor; -1 if it has no graph."""
    return int(tensor.grad_fn._sequence_nr()) if tensor.grad_fn is not None else -1


def in_transform() -> bool:
    """Returns whether a transform of torch.func, or forward-mode autograd, runs on this thread."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def has_hooks(tensor: torch.Tensor, *, besides: int = 0) -> bool:
    """Returns whether hooks wait for the gradient of a tensor, `besides` some that run after it was accumulated."""
    before, after = (getattr(tensor, name, None) or () for name in TENSOR_HOOKS)
    return bool(before) or len(after) > besides


@contextmanager
def without_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Has no hook on these tensors run inside of the block; the same hooks are there again after it."""
    held: list[dict[int, Any]] = [
        hooks for tensor in tensors for name in TENSOR_HOOKS if (hooks := getattr(tensor, name, None))
    ]
    kept = [(hooks, list(hooks.items())) for hooks in held]
    for hooks in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in kept:
            hooks.update(entries)
