"""The gradients of a run of one rank, which no other rank ever uses."""

from typing import final

import torch

from evenly._torch.autograd import in_backward
from evenly.comm import FailureMonitor, Group
from evenly.gradients.base import Gradients
from evenly.gradients.outputs import Outputs
from evenly.gradients.verdicts import GradientCheck, LastVerdicts, Verdict


@final
class SingleRankGradients(Gradients):
    """Counts samples, and looks at the gradients when a step is about to use them: no backward is watched.

    So the samples of every forward with gradients enabled count, also where no backward follows, and a step that is
    skipped by a GradScaler which `synchronize` was not given counts as none.
    """

    def __init__(self, module: torch.nn.Module, group: Group, *, monitor: FailureMonitor) -> None:
        super().__init__(module, group, monitor)
        self._module = module
        self._verdicts = LastVerdicts()
        self._check = GradientCheck(self._trained)

    def _follow(self) -> None:
        self._read_parameters(self._module)
        self._check = GradientCheck(self._trained)

    def close(self) -> None:
        """Does nothing: there are no hooks."""

    def forward(self, samples: float, *args: object, **kwargs: object) -> object:
        """Runs the module on a batch of `samples` samples; one without samples gives no gradients."""
        output = self._module(*args, **kwargs)
        if not samples:
            for tensor in Outputs(output).tensors:
                if tensor.grad_fn is not None and not any(tensor is value for value in (*args, *kwargs.values())):
                    tensor.register_hook(_without_values)
        elif not in_backward():  # inside, an activation checkpoint recomputes it
            self._averaged += samples
        return output

    def begin_step(self) -> None:
        """Looks whether the gradients are finite, which a step is about to use."""
        if self.on_backward_done is not None:
            self.on_backward_done()
        self._verdicts.record(self._check.verdict(self.step))

    def take_verdict(self, *, may_stall: bool) -> Verdict | None:
        """Returns the verdict on the last step's gradients, once. If reading it would stall a device, and it may not,
        returns that of the step before."""
        return self._verdicts.take(may_stall=may_stall)

    def end_task(self) -> None:
        """Is never called: no forward is watched."""


def _without_values(gradient: torch.Tensor) -> torch.Tensor:
    """Returns zeros in place of a gradient, which may be NaN where a mean is taken over nothing."""
    return torch.zeros_like(gradient)
