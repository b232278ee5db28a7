"""Tracks which forwards a backward belongs to: they determine its samples and whether it is averaged.

A hook on the outputs of each forward fires in every backward that passes through them. So several forwards may share a
backward, several backwards a forward, and forwards whose outputs are not used count nothing.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from evenly._torch.autograd import NO_BACKWARD, at_end_of_backward, backward_number, in_backward, next_sequence_number
from evenly.gradients.outputs import KeptTensors, Outputs


class Forward:
    """One forward of the synchronized module; as a hook on its outputs it lives as long as their graph."""

    __slots__ = ("__weakref__", "_log", "has_counted", "is_averaged", "number", "samples", "step")

    def __init__(self, log: "ForwardLog", samples: float, *, is_averaged: bool) -> None:
        self._log = weakref.ref(log)  # an autograd graph must not keep the network alive
        self.samples = samples
        self.is_averaged = is_averaged  # not made inside no_sync()
        self.step = 0  # in which it was made
        self.number: int | None = None  # autograd's sequence number before it ran, if modules may keep tensors
        self.has_counted = False  # a backward through it was complete, so its samples are counted

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Records the backward; a batch without samples adds nothing to existing gradients.

        There is no gradient if the loss leaves this output out, but not another output of the same operation.
        """
        log = self._log()
        if log is not None:
            log.reached(self)
        return None if self.samples or gradient is None else torch.zeros_like(gradient)


class LogOwner(Protocol):
    """Receives the events of backwards that reach a forward."""

    step: int  # the step that the next backward belongs to

    def begin_task(self) -> None:
        """A backward has reached its first forward."""

    def reached_empty(self, *, is_first: bool) -> None:
        """A backward with a forward of 0 samples has reached a forward, the first of this backward if `is_first`."""

    def end_task(self) -> None:
        """It is over."""


class ForwardLog:
    """The forwards of one network, and those that the running backward has passed through."""

    def __init__(self, owner: "LogOwner", module: torch.nn.Module) -> None:
        self._owner = weakref.ref(owner)  # it holds this log
        self._kept_tensors = KeptTensors(module)
        self._watched: list[weakref.ref[Forward]] = []  # those that may still be alive
        self._reached: list[Forward] = []  # by backwards since the last complete one
        self._task = NO_BACKWARD  # number of the running backward, as autograd counts them
        self._members: list[Forward] = []
        self._opaque_outputs: dict[str, None] = {}  # types of outputs that cannot be searched for tensors

    def begin(self, samples: float, *, is_averaged: bool) -> Forward:
        """Returns the record of a forward that is about to run."""
        if not in_backward():
            self._task, self._members = NO_BACKWARD, []  # left by a backward that failed
        forward = Forward(self, samples, is_averaged=is_averaged)
        if (owner := self._owner()) is not None:
            forward.step = owner.step
        if self._kept_tensors.is_due:
            forward.number = next_sequence_number()
        return forward

    def watch(self, forward: Forward, output: object, *, inputs: Sequence[object] = ()) -> None:
        """Hooks `forward` to its outputs; tensors that are also `inputs` belong to other forwards."""
        self._watched = [watched for watched in self._watched if watched() is not None]
        outputs = Outputs(output)
        if forward.number is None:
            self._kept_tensors.skip()
        else:
            outputs.tensors.extend(self._kept_tensors.since(forward.number))
        is_hooked = False
        for tensor in outputs.tensors:
            if tensor.grad_fn is not None and not any(tensor is value for value in inputs):
                tensor.register_hook(forward)
                is_hooked = True
        if is_hooked:
            self._watched.append(weakref.ref(forward))
        if outputs.unseen:
            self._opaque_outputs[outputs.unseen] = None

    def opaque_remark(self) -> str:
        """Returns a remark on outputs that cannot be searched for tensors, if there are some."""
        kinds = ", a ".join(self._opaque_outputs)
        return f", in which there was a {kinds} that cannot be looked into" if kinds else ""

    def reached(self, forward: Forward) -> None:
        """Records that the running backward passes through `forward`."""
        task = backward_number()
        if task != self._task:
            self._task, self._members = task, []
            if (owner := self._owner()) is not None:
                owner.begin_task()
            at_end_of_backward(self._queue_end)
        if forward not in self._members:
            self._members.append(forward)
            self._reached.append(forward)
            if not all(member.samples for member in self._members) and (owner := self._owner()) is not None:
                owner.reached_empty(is_first=len(self._members) == 1)

    def has_open(self, step: int) -> bool:
        """Whether a forward of this step waits for its backward."""
        return bool(self.open_forwards(step))

    def open_forwards(self, step: int) -> list[Forward]:
        """Returns the forwards of this step that no complete backward has counted."""
        return [forward for forward in self._alive() if forward.step == step and not forward.has_counted]

    @property
    def is_running(self) -> bool:
        """Whether a backward that has reached a forward runs now; activation checkpoints run others inside it."""
        return self._task != NO_BACKWARD

    @property
    def may_grow(self) -> bool:
        """Whether the running backward may still reach other forwards."""
        return any(forward not in self._members for forward in self._alive())

    def _alive(self) -> list[Forward]:
        """Returns the forwards whose graph still exists."""
        return [forward for watched in self._watched if (forward := watched()) is not None]

    def members(self) -> list[Forward]:
        """Returns the forwards that the running backward has reached."""
        return list(self._members)

    def reached_since(self) -> list[Forward]:
        """Returns the forwards that backwards have reached since the last complete one."""
        return list(self._reached)

    def complete(self) -> None:
        """Records that a backward has produced all of its gradients."""
        self._reached = []

    def forget_members(self) -> None:
        """Records that the running backward gives parameters no gradients, as autograd.grad() does."""
        self._reached = [forward for forward in self._reached if forward not in self._members]

    def _queue_end(self) -> None:
        """Queues the end behind callbacks that others, such as DDP, have queued meanwhile."""
        at_end_of_backward(self._end_task)

    def _end_task(self) -> None:
        if (owner := self._owner()) is not None:
            owner.end_task()
        self._task, self._members = NO_BACKWARD, []


def uncounted(forwards: Iterable[Forward]) -> float:
    """Returns the samples of forwards that no complete backward has counted, and counts them."""
    samples = 0.0
    for forward in forwards:
        if not forward.has_counted:
            forward.has_counted = True
            samples += forward.samples
    return samples
