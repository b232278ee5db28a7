"""The gradients of a run of one rank, which no other rank ever uses."""

from typing import final

import torch

from evenly._torch.autograd import in_backward
from evenly._torch.foreach import FinitenessOnHost, largest_magnitude
from evenly.comm import FailureMonitor, Group
from evenly.gradients.base import Gradients
from evenly.gradients.outputs import Outputs
from evenly.gradients.verdicts import DeviceVerdict, HostVerdict, LastVerdicts, Verdict


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
        self._is_finite_on_host = FinitenessOnHost()
        self._is_on_host = all(parameter.device.type == "cpu" for parameter in self._trained)

    def _follow(self) -> None:
        self._read_parameters(self._module)
        self._is_on_host = all(parameter.device.type == "cpu" for parameter in self._trained)

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
        gradients = [gradient for parameter in self._trained if (gradient := parameter.grad) is not None]
        if self._is_on_host:
            self._verdicts.record(HostVerdict(self.step, self._is_finite_on_host(gradients)))
        elif gradients:
            self._verdicts.record(DeviceVerdict(self.step, largest_magnitude(gradients)))

    def take_verdict(self, *, may_stall: bool) -> Verdict | None:
        """Returns the verdict on the last step's gradients, once. If reading it would stall a device, and it may not,
        returns that of the step before."""
        return self._verdicts.take(may_stall=may_stall)

    def end_task(self) -> None:
        """Is never called: no forward is watched."""


def _without_values(gradient: torch.Tensor) -> torch.Tensor:
    """Returns zeros in place of a gradient, which may be NaN where a mean is taken over nothing."""
    return torch.zeros_like(gradient)
