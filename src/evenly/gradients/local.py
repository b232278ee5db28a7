"""The gradients of a rank that is alone in its node: nobody to average with, so they stay as backward made them."""

from typing import final

import torch
from torch.utils.hooks import RemovableHandle

from evenly._torch.autograd import in_backward, will_reach
from evenly.comm import FailureMonitor, Group
from evenly.gradients.base import Gradients
from evenly.gradients.forwards import Forward, uncounted
from evenly.gradients.verdicts import GradientCheck, LastVerdicts, Verdict


@final
class LocalGradients(Gradients):
    """Counts the samples behind gradients and looks whether they are finite; changes nothing about them.

    As with other ranks in the node, a step on gradients of a backward inside no_sync(), or of one without a forward of
    the synchronized model, is an error, and a batch without samples adds nothing.
    """

    def __init__(self, module: torch.nn.Module, group: Group, *, monitor: FailureMonitor) -> None:
        super().__init__(module, group, monitor)
        self._module = module
        self._verdicts = LastVerdicts()
        self._filled: list[torch.Tensor] = []  # parameters, as backwards give them gradients; until one is complete
        self._filled_by_loss: set[int] = set()  # ids of those that had theirs before it reached an output
        self._hooks: list[RemovableHandle] = []
        for parameter in module.parameters():
            parameter.grad = None  # with other ranks it would not be averaged
        self._watch()

    def _watch(self) -> None:
        """Has every gradient noted. A hook that is Python's own `list.append` costs least."""
        self._check = GradientCheck(self._trained)
        self._hooks = [p.register_post_accumulate_grad_hook(self._filled.append) for p in self._trained]

    def _follow(self) -> None:
        self.close()
        self._read_parameters(self._module)
        self._watch()
        self._record_gradients()

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def forward(self, samples: float, *args: object, **kwargs: object) -> object:
        """Runs the module on a batch of `samples` samples."""
        if not in_backward():  # inside, an activation checkpoint recomputes it
            self._record_foreign()
            self._forget_abandoned()
        forward = self._log.begin(samples, is_averaged=not self._is_paused)
        output = self._module(*args, **kwargs)
        self._log.watch(forward, output, inputs=(*args, *kwargs.values()))
        return output

    def take_verdict(self, *, may_stall: bool) -> Verdict | None:
        """Returns the last backward's verdict, once. If reading it would stall a device, and it may not, returns that
        of the backward before."""
        return self._verdicts.take(may_stall=may_stall)

    def require_averaged(self) -> None:
        """Raises `SpecError` unless all gradients that a step is about to use come from the synchronized model."""
        if not in_backward():  # optimizers may make their steps in it
            self._record_foreign()
        super().require_averaged()

    def begin_task(self) -> None:
        """Runs when a backward reaches a forward; its loss, or other backwards, may have used parameters before."""
        if not all(map(will_reach, self._filled)):
            self._record_foreign()
        self._filled_by_loss = set(map(id, self._filled))
        super().begin_task()

    def end_task(self) -> None:
        """Runs at the end of a backward that has reached a forward."""
        forwards = self._log.members()
        self._log.complete()
        if not self._filled:  # autograd.grad() gives parameters nothing
            return
        if self._adds_nothing(forwards):
            changed = [p for p in self._trained if p.grad is not None]
            self._restore(changed, [p.grad for p in changed if p.grad is not None])
        self._before = None
        first, self._filled_by_loss = self._filled_by_loss, set()
        is_second = bool(first) and any(id(parameter) in first for parameter in self._filled[len(first) :])
        self._filled.clear()
        if is_second:  # a backward gives a gradient once: the first came from one before
            self._record_local([])
        if any(forward.is_averaged for forward in forwards):
            self._end_averaged(forwards)
        else:
            self._record_local(forwards)
        self._record_gradients()

    def _end_averaged(self, forwards: list[Forward]) -> None:
        if self.on_backward_done is not None:
            self.on_backward_done()
        self._monitor.count_backward()  # which nodes compare where a scaler may have skipped a step
        weight = self._samples_to_average(forwards)
        if weight:
            self._verdicts.record(self._check.verdict(self.step))
        self._record_averaged(weight, uncounted(forwards))

    def _record_foreign(self) -> None:
        """Records the backward that filled gradients without a forward of the synchronized model, if there was one."""
        if self._filled:
            self._filled.clear()
            self._record_local([])
            self._record_gradients()

    def _untouched(self) -> list[torch.Tensor]:
        filled = set(map(id, self._filled))
        return [parameter for parameter in self._trained if id(parameter) not in filled]
