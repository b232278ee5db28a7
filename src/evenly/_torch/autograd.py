"""State of autograd's engine: which backward runs, which parameters it will reach, and when it ends.

torch.autograd.graph and torch's DDP use the same names of torch._C in torch 2.11 and 2.13.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch.autograd import forward_ad
from torch.utils import checkpoint

NO_BACKWARD = -1
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # the dicts that the engine reads

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Returns how often a tensor was changed in place; autograd's counter has no public name."""


@contextmanager
def outside_user_contexts() -> Iterator[None]:
    """Runs what is inside as if no inference mode and no hooks of saved tensors were around it.

    Only the innermost hooks are called: those of activation checkpoints count the tensors that a forward saves, and
    `save_on_cpu` copies them, which meta tensors do not allow.
    """
    with torch.inference_mode(False), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        yield


def is_saving_hooked() -> bool:
    """Returns whether hooks of saved tensors are around, as in an activation checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_end_of_recomputing(error: BaseException) -> bool:
    """Returns whether an activation checkpoint raised this error to end a forward of which it has seen enough."""
    return isinstance(error, checkpoint._StopRecomputationError)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def backward_number() -> int:
    """Returns the number of the backward that runs on this thread, `NO_BACKWARD` without one.

    The numbers of two backwards differ, even if an activation checkpoint runs one inside the other.
    """
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Returns whether autograd runs a backward on this thread; activation checkpoints run forwards in it."""
    return bool(torch._C._current_graph_task_id() != NO_BACKWARD)


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Makes the running backward call `act` when all gradients are computed, after callbacks queued before.

    DDP and FSDP end their backwards in the same way. The engine drops the queue at the end of the backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(act)


def will_reach(parameter: torch.Tensor) -> bool:
    """Returns whether the running backward gives this parameter a gradient; autograd.grad() gives none."""
    with torch.enable_grad():
        view_node = parameter.view_as(parameter).grad_fn
    # the public access to the node that accumulates the parameter's gradient
    node = view_node.next_functions[0][0] if view_node is not None else None
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # in autograd.grad()
        return False


def next_sequence_number() -> int:
    """Returns the number that autograd gives to the next operation of this thread, as torch's profiler shows it."""
    if torch.compiler.is_compiling():  # it cannot trace the next line, and warns
        return 0
    return int(torch._C._autograd._get_sequence_nr())


def sequence_number_of(tensor: torch.Tensor) -> int:
    """Returns the number of the operation that computed a tensor; -1 if it has no graph."""
    return int(tensor.grad_fn._sequence_nr()) if tensor.grad_fn is not None else -1


def in_transform() -> bool:
    """Returns whether a transform of torch.func, or forward-mode autograd, runs on this thread."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def has_hooks(tensor: torch.Tensor, *, besides: int = 0) -> bool:
    """Returns whether a tensor has gradient hooks, not counting `besides` hooks that run after accumulation."""
    before, after = (getattr(tensor, name, None) or () for name in TENSOR_HOOKS)
    return bool(before) or len(after) > besides


@contextmanager
def without_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Removes the hooks of these tensors inside the block, and restores them after it."""
    tables: list[dict[int, object]] = [
        hooks for tensor in tensors for name in TENSOR_HOOKS if (hooks := getattr(tensor, name, None))
    ]
    saved_entries = [(hooks, list(hooks.items())) for hooks in tables]
    for hooks in tables:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in saved_entries:
            hooks.update(entries)
