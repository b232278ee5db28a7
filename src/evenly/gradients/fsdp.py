"""The gradients of a network that FSDP shards over the ranks of a node: FSDP adds them up, here they are weighted."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.hooks import RemovableHandle

from evenly._torch.autograd import in_backward, is_end_of_recomputing, will_reach
from evenly._torch.dtensor import are_scaled, scale_reduce_scatters, unsharded_gradients
from evenly._torch.foreach import FinitenessOnHost, largest_magnitude
from evenly.comm import CollectiveWaiter, FailureMonitor, Group, Work, all_reduce
from evenly.errors import SpecError
from evenly.gradients.base import Gradients
from evenly.gradients.forwards import Forward, uncounted
from evenly.gradients.verdicts import DeviceVerdict, HostVerdict, LastVerdicts, Verdict

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclass
class _Count:
    """The samples of one forward: of this rank, and of all ranks of the node once `work` is done."""

    own: float
    summed: torch.Tensor
    work: Work

    @property
    def total(self) -> float:
        """The samples of all ranks."""
        return float(self.summed)


@dataclass(frozen=True)
class SharedVerdict:
    """A verdict that ranks share, each of which holds a part of the gradients."""

    step: int
    num_members: int
    num_nonfinite: torch.Tensor  # parts; once `work` is done
    work: Work
    waiter: CollectiveWaiter

    def nonfinite_members(self) -> list[int]:
        """Returns all members if a part was not finite: each part is a sum over all of them."""
        self.waiter.wait([self.work])
        return list(range(self.num_members)) if self.num_nonfinite.item() else []


@final
class FsdpGradients(Gradients):
    """Weights the gradients that FSDP averages over the ranks of a node by the samples of each rank.

    With b_r samples on each of R ranks, whose loss is a mean, FSDP's result would be sum_r g_r / R. Each rank's
    gradients are multiplied by b_r R / sum_s b_s before FSDP adds them up, so that it is sum_r b_r g_r / sum_s b_s. The
    counts are exchanged while the forward runs.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: Group,
        *,
        fsdp_modules: "Sequence[FSDPModule]",
        monitor: FailureMonitor,
        timeout_s: float,
    ) -> None:
        """`group` is one over the memory of hosts."""
        super().__init__(module, group, monitor)
        self._module, self._fsdp_modules, self._timeout_s = module, fsdp_modules, timeout_s
        self._counts: WeakKeyDictionary[Forward, _Count] = WeakKeyDictionary()
        self._unread: list[_Count] = []  # whose work nobody has waited for
        self._accumulated_total = 0.0  # the samples of all ranks for those of `_accumulated`
        self._factor = 1.0  # of this rank's gradients in the running backward
        self._is_reducing = True  # whether FSDP adds up the gradients of the next backward
        self._has_reduced = False  # a reduce-scatter was made since the last complete backward
        self._filled: list[torch.Tensor] = []  # on one rank, which makes none: parameters, as they get gradients
        self._verdicts = LastVerdicts()
        self._is_finite_on_host = FinitenessOnHost()
        for parameter in module.parameters():
            parameter.grad = None  # it was not weighted
        owner = ref(self)  # FSDP must not keep this alive
        self._restore_reduce_scatters = scale_reduce_scatters(
            fsdp_modules, partial(_factor_of, owner), partial(_add_bytes, owner)
        )
        self._hooks: list[RemovableHandle] = []
        self._watch()

    def _watch(self) -> None:
        if self._group.size() > 1:
            return  # on a GPU whose gradients FSDP moves to the host, hooks would make it wait for each
        self._hooks = [p.register_post_accumulate_grad_hook(self._filled.append) for p in self._trained]

    def _follow(self) -> None:
        self._remove_hooks()
        self._read_parameters(self._module)
        self._watch()
        self._record_gradients()

    def close(self) -> None:
        """Removes the hooks, and gives FSDP its own averages back."""
        self._remove_hooks()
        self._restore_reduce_scatters()
        self._set_reduced(is_reduced=True)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def forward(self, samples: float, *args: object, **kwargs: object) -> object:
        """Runs the module on a batch of `samples` samples; all ranks of the node call it together."""
        if not in_backward():  # inside, an activation checkpoint recomputes it
            self._record_foreign()
            self._forget_abandoned()
        self._read_counts()
        forward = self._log.begin(samples, is_averaged=not self._is_paused)
        summed = torch.tensor([samples], dtype=torch.float64, device="cpu")
        count = _Count(samples, summed, all_reduce(summed, self._group))
        self._counts[forward] = count
        self._unread.append(count)
        try:
            output = self._module(*args, **kwargs)
        except Exception as error:
            if not is_end_of_recomputing(error):
                self._monitor.report(error)
            raise
        self._log.watch(forward, output, inputs=(*args, *kwargs.values()))
        return output

    def _read_counts(self) -> None:
        if self._unread:
            self._waiter(f"the samples of step {self.step}").wait([count.work for count in self._unread])
            self._unread.clear()

    def _waiter(self, label: str) -> CollectiveWaiter:
        return CollectiveWaiter(self._monitor, label=label, step=self.step - 1, timeout_s=self._timeout_s)

    def take_verdict(self, *, may_stall: bool) -> Verdict | None:
        """Returns the verdict on the last backward, once; all ranks of the node call it together. If reading it would
        stall a device, and it may not, returns that of the backward before."""
        verdict = self._verdicts.take(may_stall=may_stall)
        if verdict is None:
            return None
        count = torch.tensor([float(bool(verdict.nonfinite_members()))], dtype=torch.float64, device="cpu")
        waiter = self._waiter(f"the check of the gradients of step {verdict.step}")
        return SharedVerdict(verdict.step, self._group.size(), count, all_reduce(count, self._group), waiter)

    def require_averaged(self) -> None:
        """Raises `SpecError` unless all gradients that a step is about to use come from the synchronized model."""
        if not in_backward():  # optimizers may make their steps in it
            self._record_foreign()
        super().require_averaged()

    def begin_task(self) -> None:
        """Runs when a backward reaches a forward, before FSDP has added up any of its gradients."""
        if self._has_reduced or not all(map(will_reach, self._filled)):
            self._record_foreign()
        super().begin_task()
        if not are_scaled(self._fsdp_modules):
            raise self._reported(
                SpecError(
                    "set_custom_reduce_scatter was called on a module of FSDP after synchronize, which weights "
                    "gradients there. Call it before."
                )
            )
        self._read_counts()
        forwards = self._log.open_forwards(self.step)
        self._set_reduced(is_reduced=any(forward.is_averaged for forward in forwards))
        self._factor = self._factor_for(forwards)

    def reached_empty(self, *, is_first: bool) -> None:
        """Runs when a backward reaches the outputs of a batch without samples; its gradients are multiplied by 0."""

    def end_task(self) -> None:
        """Runs at the end of a backward that has reached a forward."""
        forwards, used = self._log.members(), self._factor
        self._factor = 1.0
        is_averaged = any(forward.is_averaged for forward in forwards)
        if not self._is_reducing:
            self._set_reduced(is_reduced=True)  # also in backwards that do not come here
        if is_averaged and not (self._has_reduced or self._filled):  # autograd.grad() gives parameters nothing
            self._log.forget_members()
            return
        self._has_reduced = False
        self._filled.clear()
        self._log.complete()
        if not is_averaged:
            self._accumulated_total += sum(self._counts[f].total for f in forwards if not f.has_counted)
            self._record_local(forwards)
            self._record_gradients()
            return
        if abs(self._factor_for(forwards) - used) > 1e-9 * used:
            raise self._reported(
                SpecError(
                    "a backward did not use all forwards of its step, and these had unequal shares of the samples of "
                    "their node: FSDP adds gradients up before it is known which are used. Call backward() before the "
                    "next forward, or once for all of them."
                )
            )
        self._end_averaged(forwards)

    def _end_averaged(self, forwards: Sequence[Forward]) -> None:
        if self.on_backward_done is not None:
            self.on_backward_done()
        self._monitor.count_backward()
        weight = self._samples_to_average(forwards)
        self._accumulated_total = 0.0
        self._verdicts.record(self._look())
        self._record_averaged(weight, uncounted(forwards))
        self._record_gradients()

    def _look(self) -> HostVerdict | DeviceVerdict:
        """Returns the verdict on this rank's parts of the gradients."""
        parts = super().parts()
        device = parts[0].device if parts else self._trained[0].device
        if device.type == "cpu":
            return HostVerdict(self.step, self._is_finite_on_host(parts))
        return DeviceVerdict(self.step, largest_magnitude(parts) if parts else torch.zeros((), device=device))

    def parts(self) -> list[torch.Tensor]:
        """Returns the gradients that exist: this rank's parts, and what FSDP has not added up yet."""
        return [*super().parts(), *unsharded_gradients(self._fsdp_modules)]

    def are_reset(self) -> bool:
        """Returns whether the gradients of all ranks of the node are None or zeros; all of them call it together."""
        parts = torch.tensor([float(not super().are_reset())], dtype=torch.float64, device="cpu")
        self._waiter(f"the gradients before step {self.step}").wait([all_reduce(parts, self._group)])
        return not parts.item()

    def _factor_for(self, forwards: Sequence[Forward]) -> float:
        """Returns b_r R / sum_s b_s for a backward through these forwards."""
        own = self._accumulated + sum(self._counts[forward].own for forward in forwards)
        total = self._accumulated_total + sum(self._counts[forward].total for forward in forwards)
        return own * self._group.size() / total if total else 1.0

    def _set_reduced(self, *, is_reduced: bool) -> None:
        """Says whether FSDP adds up the gradients of the next backward, or keeps them for a later one."""
        self._is_reducing = is_reduced
        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(is_reduced, recurse=False)

    def _record_foreign(self) -> None:
        """Records the backward that filled gradients without a forward of the synchronized model, if there was one."""
        if self._has_reduced or self._filled:
            self._has_reduced = False
            self._filled.clear()
            self._record_local([])
            self._record_gradients()

    def _may_be_reset(self) -> bool:
        """Returns whether gradients may have been reset; FSDP keeps those of no_sync(), also after zero_grad()."""
        return not self._has_local and super()._may_be_reset()

    def take_samples(self) -> float:
        """Returns the samples averaged since the last call."""
        if not self._accumulated:
            self._accumulated_total = 0.0
        return super().take_samples()


def _factor_of(owner: "ref[FsdpGradients]") -> float:
    gradients = owner()
    return 1.0 if gradients is None else gradients._factor


def _add_bytes(owner: "ref[FsdpGradients]", sent_bytes: int) -> None:
    gradients = owner()
    if gradients is not None:
        gradients.sent_bytes += sent_bytes
        gradients._has_reduced = True
