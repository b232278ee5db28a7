"""The interface for averaging gradients inside a node, and the checks before a step uses them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from evenly._torch.autograd import version_of
from evenly.comm import CollectiveWaiter, FailureMonitor, Group, all_reduce, local_tensor, to_device, to_host
from evenly.errors import SpecError
from evenly.gradients.forwards import Forward, ForwardLog, uncounted
from evenly.gradients.verdicts import Verdict

_Version = tuple[int, int, int]


class Gradients(ABC):
    """Averages gradients at every backward, weighted by samples, and checks that a step uses averaged gradients only.

    Backwards inside no_sync() stay local, and so do those without a forward of the synchronized model. The next
    averaged backward includes the gradients accumulated in no_sync(); a step on other local gradients is an error.
    """

    step: int = 1  # the step that the next backward belongs to
    pending: bool = False  # a backward was averaged and no step has used it yet
    on_backward_done: Callable[[], None] | None = None  # called when this rank's own backward is done
    sent_bytes: int = 0  # to other ranks, for all gradients so far
    _counts_batch: bool = True  # whether this rank counts the batch; one rank does for a network cut over ranks

    def __init__(self, module: torch.nn.Module, group: Group, monitor: FailureMonitor) -> None:
        self._group, self._monitor = group, monitor
        self._read_parameters(module)
        self._log = ForwardLog(self, module)
        self._is_paused = False
        self._accumulated = 0.0  # samples of backwards in no_sync() since the last averaged one
        self._last_weight = 0.0
        self._averaged = 0.0  # samples behind the gradients averaged since the last step
        self._has_averaged = self._has_local = self._has_foreign = False  # kinds of backwards since the last step
        self._before: dict[int, torch.Tensor] | None = None  # gradients, where the running backward has no samples
        self._last_gradient: tuple[torch.Tensor, _Version] | None = None  # a parameter, the version of its gradient
        self._is_touched = self._had_gradients = False  # when such a backward reached the outputs

    def _read_parameters(self, module: torch.nn.Module) -> None:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names, self._trained = list(trained), list(trained.values())

    @property
    def has_open_forward(self) -> bool:
        """Whether a forward of this step waits for its backward, with the parameters that it was made with."""
        return self._log.has_open(self.step)

    def parts(self) -> list[torch.Tensor]:
        """Returns the gradients that exist, averaged or not; of DTensors this rank's parts."""
        return [local_tensor(p.grad) for p in self._trained if p.grad is not None]

    def are_reset(self) -> bool:
        """Returns whether the gradients are None or zeros; on all ranks that hold parts of them, called together."""
        return all(map(_is_empty, self._untouched()))

    @abstractmethod
    def forward(self, samples: float, *args: object, **kwargs: object) -> object:
        """Runs the module on a batch of `samples` samples."""

    @abstractmethod
    def take_verdict(self, *, may_stall: bool) -> Verdict | None:
        """Returns the last backward's verdict, once. If reading it would stall a device, and it may not, returns that
        of the backward before."""

    def begin_step(self) -> None:
        """Runs before an optimizer uses the gradients, or after its closure has."""
        return

    def follow_parameters(self) -> None:
        """Averages the gradients of the parameters that are trained now; all ranks that share them call it together.

        Raises:
            SpecError: where gradients of this step exist that were not averaged, and now may never be.
        """
        self._forget_abandoned()
        if self._accumulated or self._has_local:
            raise SpecError(
                "parameters were frozen or unfrozen after a backward inside no_sync(), whose gradients are not yet "
                "averaged with the other ranks. Do it between optimizer.step() and the next forward."
            )
        self._follow()

    @abstractmethod
    def _follow(self) -> None:
        """Switches to the parameters of the module that are trained now."""

    @abstractmethod
    def close(self) -> None:
        """Removes the hooks from the module."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps gradients local; they accumulate until the next backward of a forward outside."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def take_samples(self) -> float:
        """Returns the samples of the gradients averaged since the last call that this rank counts."""
        samples, self._averaged, self.pending = self._averaged, 0.0, False
        self._has_averaged = self._has_local = self._has_foreign = False
        return samples

    def require_averaged(self) -> None:
        """Raises `SpecError` unless all gradients that a step is about to use are the same on all ranks of the node."""
        case = "optimizer.step() was called with gradients that were not averaged with the other ranks"
        if self._has_foreign:
            raise SpecError(
                f"{case}: a backward did not come from what a forward of the synchronized model returned"
                f"{self._log.opaque_remark()}, but from the plain module, a layer, a parameter or a tensor kept "
                "elsewhere. Call the synchronized model, let it return what losses are made of, and add penalties to "
                "its loss."
            )
        if self._has_local:
            raise SpecError(
                f"{case}: the last backward was that of a forward inside no_sync(). Leave no_sync() for the last "
                "micro-batch before a step."
            )
        if not self._has_averaged and any(parameter.grad is not None for parameter in self._trained):
            raise SpecError(
                f"{case}: there was no backward of the synchronized model since the last step, so they are old or "
                "were set by hand. Call backward() before each step, and zero_grad() after it."
            )

    def _incomplete(self, call: str, missing: Sequence[str]) -> str:
        frozen = [name for name, p in zip(self._names, self._trained, strict=True) if not p.requires_grad]
        if frozen:
            return (
                f"{call} was called, but the parameter {frozen[0]!r} is no longer trained, which was different in the "
                "forward of this step: gradients were not averaged with the other ranks. Freeze parameters between "
                "optimizer.step() and the next forward."
            )
        names = ", ".join(map(repr, missing[:3])) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        return (
            f"{call} was called after a backward that gave no gradient to {names}, so gradients were not averaged "
            "with the other ranks. Let each loss use all parameters (add up the losses of one step), freeze those that "
            "are not trained, or pass find_unused_parameters=True."
        )

    def _samples_to_average(self, forwards: Sequence[Forward]) -> float:
        return self._accumulated + sum(forward.samples for forward in forwards)

    def mean_loss(self, loss: object, waiter: CollectiveWaiter) -> object:
        """Returns the mean of a loss over the ranks that share gradients, weighted as the last backward's gradients.

        All of these ranks call it together. A loss that is not one number is returned unchanged.
        """
        if self._group.size() == 1 or loss is None or (isinstance(loss, torch.Tensor) and loss.numel() != 1):
            return loss
        device = self._trained[0].device
        value = torch.as_tensor(loss, dtype=torch.float64, device=device).detach().reshape(())
        weight = self._last_weight if self._counts_batch else 0.0
        row = torch.zeros(4, dtype=torch.float64, device=device)  # weighted sum, weights, sum, ranks
        row[0], row[1] = value * weight if weight else 0.0, weight
        row[2], row[3] = value, 1.0
        host_row = to_host(row, self._group)
        waiter.wait([all_reduce(host_row, self._group)])
        total = to_device(host_row, device)
        mean = torch.where(total[1] > 0, total[0] / total[1], total[2] / total[3])
        return mean.to(loss.dtype) if isinstance(loss, torch.Tensor) else float(mean)

    def _record_averaged(self, weight: float, samples: float) -> None:
        """Records a complete averaged backward with this weight; `samples` were not counted before."""
        self._last_weight = weight
        self._averaged += self._accumulated + samples
        self._accumulated = 0.0
        self._has_averaged = self.pending = True
        self._has_local = False

    def _record_local(self, forwards: Sequence[Forward]) -> None:
        """Records a complete backward that was not averaged."""
        self._accumulated += uncounted(forwards)
        if forwards:
            self._has_local = True
        else:
            self._has_foreign = True

    def _reported(self, error: SpecError) -> SpecError:
        """Reports the error to the other ranks and returns it."""
        self._monitor.report(error)
        return error

    def _untouched(self) -> Sequence[torch.Tensor]:
        """Returns the trained parameters whose gradient the running backward has not changed yet."""
        return self._trained

    def _forget_abandoned(self) -> None:
        """Forgets backwards whose gradients were set to None or zero; their samples do not count."""
        has_any = self._accumulated or self._has_averaged or self._has_local or self._has_foreign
        if has_any and self._may_be_reset() and self.are_reset():
            self._accumulated = self._averaged = 0.0
            self._has_averaged = self._has_local = self._has_foreign = False

    def _record_gradients(self) -> None:
        """Records the gradients after the last backward, which may be zeros."""
        parameter = next((p for p in self._trained if p.grad is not None), None)
        gradient = None if parameter is None else parameter.grad
        if parameter is None or gradient is None:
            self._last_gradient = None
        else:
            self._last_gradient = (parameter, _version(gradient))

    def _may_be_reset(self) -> bool:
        """Returns whether gradients may have been set to None or zero since the last backward."""
        if self._last_gradient is None:
            return True
        parameter, version = self._last_gradient
        gradient = parameter.grad
        return gradient is None or _version(gradient) != version

    def begin_task(self) -> None:
        """Runs when a backward reaches the outputs of the first of its forwards."""
        self._forget_abandoned()
        self._before = None
        self._is_touched = self._had_gradients = False

    def reached_empty(self, *, is_first: bool) -> None:
        """Runs when a backward reaches the outputs of a batch without samples, which must add nothing."""
        untouched = self._untouched()
        self._is_touched |= len(untouched) < len(self._trained)  # by the loss, which uses parameters directly
        if is_first:
            self._had_gradients = not all(map(_is_empty, untouched))
            self._before = {id(p): p.grad.detach().clone() for p in untouched if p.grad is not None}

    @abstractmethod
    def end_task(self) -> None:
        """Runs at the end of a backward that has reached a forward."""

    def _adds_nothing(self, forwards: Sequence[Forward]) -> bool:
        """Returns whether no batch of the running backward has samples, so that gradients must not change."""
        has_samples = any(forward.samples for forward in forwards)
        if self._is_touched and (has_samples or self._had_gradients):
            error = SpecError(
                "a batch that counts no samples was given together with others of the same step, and its loss uses "
                "parameters of the model directly: its gradients cannot be separated from those of the others. Let "
                "forward() use them, or leave such a batch out."
            )
            raise self._reported(error)
        return self._before is not None and not has_samples

    def _restore(self, parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]) -> None:
        """Restores the gradients from before the running backward."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            before = (self._before or {}).get(id(parameter))
            if before is None:
                gradient.zero_()
            else:
                gradient.copy_(before)


def _version(gradient: torch.Tensor) -> _Version:
    """Returns what changes with a gradient: operations on a DTensor count for itself, those of FSDP for its part."""
    return id(gradient), version_of(gradient), version_of(local_tensor(gradient))


def _is_empty(parameter: torch.Tensor) -> bool:
    """Returns whether the gradient is None or all zeros."""
    return parameter.grad is None or not bool(local_tensor(parameter.grad).any())
