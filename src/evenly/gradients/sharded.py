"""Averages the gradients of replicas that are cut over ranks, at the end of every backward, in global coordinates."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch.utils.hooks import RemovableHandle

from evenly._torch.autograd import at_end_of_backward, in_backward
from evenly._torch.dtensor import redistributed_like
from evenly.comm import CollectiveWaiter, FailureMonitor, Group, all_reduce, local_tensor
from evenly.comm.blocks.reducer import BlockReducer
from evenly.comm.blocks.replicas import ReplicaRanks
from evenly.errors import MismatchError
from evenly.gradients.base import Gradients
from evenly.gradients.buckets import finite, finiteness_check
from evenly.gradients.forwards import uncounted


@dataclass(frozen=True)
class Tally:
    """Which ranks had non-finite gradients in one backward."""

    step: int
    nonfinite: tuple[int, ...]  # members whose gradients were not finite

    def nonfinite_members(self) -> list[int]:
        """Returns the members of the group whose gradients were not finite."""
        return list(self.nonfinite)


@final
class ShardedGradients(Gradients):
    """Averages the gradients of replicas: sum_R b_R g_R / sum_R b_R, with b_R samples in the batch of replica R.

    One small all-reduce at the end of backward exchanges the samples of each rank, which parameters have a gradient,
    and whether all are finite. Gradients themselves are sent between replicas only.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        block_reducer: BlockReducer,
        group: Group,
        *,
        ranks: Sequence[int],
        replicas: Sequence[ReplicaRanks],
        monitor: FailureMonitor,
        timeout_s: float,
    ) -> None:
        super().__init__(module, group, monitor)
        self._module, self._block_reducer = module, block_reducer
        self._timeout_s = timeout_s
        self._ranks = tuple(ranks)
        self._replicas = [[self._ranks.index(rank) for rank in replica.all_ranks] for replica in replicas]
        self._counts_batch = any(monitor.rank_group.rank == replica.ranks[0] for replica in replicas)
        self._is_idle = any(monitor.rank_group.rank in replica.idle_ranks for replica in replicas)
        self._begun = self._is_queued = False
        self._filled: set[int] = set()  # ids of parameters that got a gradient in the running backward
        self._latest: Tally | None = None
        self._hooks = [_on_gradient(p, self._arrived) for p in module.parameters() if p.requires_grad]

    def forward(self, samples: float, *args: object, **kwargs: object) -> object:
        """Runs the module on a batch of `samples` samples; all ranks of the replica call it together."""
        if not in_backward():  # inside, an activation checkpoint recomputes it
            self._forget_abandoned()
            self._filled, self._is_queued = set(), False  # left by a backward that failed
        if not self._begun:
            self._begun = True
            self._monitor.count_backward()
        forward = self._log.begin(samples, is_averaged=not self._is_paused)
        try:
            output = self._module(*args, **kwargs)
        except Exception as error:
            self._monitor.report(error)
            raise
        self._log.watch(forward, output, inputs=(*args, *kwargs.values()))
        return output

    def take_samples(self) -> float:
        """Returns the samples averaged since the last call; the first rank of a replica counts its batch."""
        samples = super().take_samples()
        return samples if self._counts_batch else 0.0

    def take_verdict(self, *, may_stall: bool) -> Tally | None:
        """Returns the verdict of the last backward, once."""
        latest, self._latest = self._latest, None
        return latest

    def follow(self, block_reducer: BlockReducer) -> None:
        """Switches to the current parameters of the module, reduced by `block_reducer`."""
        self._block_reducer = block_reducer
        self._follow()

    def _follow(self) -> None:
        self.close()
        self._read_parameters(self._module)
        self._hooks = [_on_gradient(p, self._arrived) for p in self._trained]

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, parameter: torch.Tensor) -> None:
        self._filled.add(id(parameter))
        if not self._log.is_running and not self._is_queued:
            self._is_queued = True
            at_end_of_backward(self.end_task)

    def _untouched(self) -> list[torch.Tensor]:
        return [parameter for parameter in self._trained if id(parameter) not in self._filled]

    @torch.no_grad()
    def end_task(self) -> None:
        """Runs when all gradients of a backward are ready."""
        if not self._filled:  # autograd.grad() gives parameters nothing
            return
        self._filled, self._is_queued = set(), False
        forwards = self._log.members()
        if self._adds_nothing(forwards):
            with_gradient = [parameter for parameter in self._trained if parameter.grad is not None]
            self._restore(with_gradient, [parameter.grad for parameter in with_gradient if parameter.grad is not None])
        self._before = None
        self._log.complete()
        if not any(forward.is_averaged for forward in forwards):
            self._record_local(forwards)
            self._record_gradients()
            return
        self._begun = False
        if self.on_backward_done is not None:
            self.on_backward_done()
        weight = self._samples_to_average(forwards)
        self._record_averaged(weight, uncounted(forwards))
        waiter = CollectiveWaiter(
            self._monitor, label=f"the gradients of step {self.step}", step=self.step - 1, timeout_s=self._timeout_s
        )
        try:
            self._average(weight, waiter)
        except Exception as error:
            self._monitor.report(error)
            raise
        self._record_gradients()

    def _average(self, weight: float, waiter: CollectiveWaiter) -> None:
        trained = dict(zip(self._names, self._trained, strict=True))
        if self._block_reducer.num_participants > 1:
            for parameter in self._trained:
                if parameter.grad is not None:  # of tensor parallelism by hand it may be a sum that is not made yet
                    parameter.grad = redistributed_like(parameter, parameter.grad)
        gradients_by_name = {name: local_tensor(p.grad) for name, p in trained.items() if p.grad is not None}
        if not weight:
            for gradient in gradients_by_name.values():
                gradient.copy_(finite(gradient))  # a mean over no samples is NaN
        samples, nonfinite, used = self._exchange_tally(list(trained), gradients_by_name, weight, waiter)
        self._latest = Tally(self.step, tuple(nonfinite))
        if nonfinite:
            _mark_nonfinite(gradients_by_name.values())
        elif self._block_reducer.num_participants > 1:
            gradients = {name: _gradient(p) for name, p in trained.items() if name in used}
            summed = [(name, g.float() if g.dtype.itemsize < 4 else g) for name, g in gradients.items()]
            share = (
                weight / samples if samples else 1 / self._block_reducer.num_participants
            )  # no samples: equal shares
            self.sent_bytes += self._block_reducer.reduce(summed, waiter, weight=share)
            self._block_reducer.broadcast(summed, waiter)
            for (_, value), gradient in zip(summed, gradients.values(), strict=True):
                if value is not gradient:
                    gradient.copy_(value)

    def _exchange_tally(
        self, names: list[str], gradients: dict[str, torch.Tensor], weight: float, waiter: CollectiveWaiter
    ) -> tuple[float, list[int], set[str]]:
        """Returns the samples of all replicas, the members whose gradients are not finite, the parameters used."""
        size = len(self._ranks)
        device = next(self._module.parameters()).device
        tally = torch.zeros(2 * size + len(names), dtype=torch.float64, device=device)
        member = self._ranks.index(self._monitor.rank_group.rank)
        tally[size + member] = weight
        if not self._is_idle:
            tally[2 * size :] = torch.tensor([name in gradients for name in names], dtype=torch.float64)
        if gradients and weight:
            checks = [finiteness_check(gradient).double() for gradient in gradients.values()]
            tally[member] = (~torch.isfinite(torch.stack(checks).sum())).double()
        if size > 1:
            waiter.wait([all_reduce(tally, self._group)])
        summed = tally.tolist()
        counts = summed[size : 2 * size]
        self._require_one_count(counts)
        return (
            sum(counts[members[0]] for members in self._replicas),
            [member for member, bad in enumerate(summed[:size]) if bad],
            {name for name, used in zip(names, summed[2 * size :], strict=True) if used},
        )

    def _require_one_count(self, counts: list[float]) -> None:
        for members in self._replicas:
            if len({counts[member] for member in members}) > 1:
                counts_by_rank = ", ".join(f"rank {self._ranks[member]}: {counts[member]:g}" for member in members)
                raise MismatchError(
                    f"the ranks of one network were given batches of unequal numbers of samples in step {self.step} "
                    f"({counts_by_rank}). Give all ranks that hold one network together the same batch."
                )


def _on_gradient(parameter: torch.Tensor, act: Callable[[torch.Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(act)
    return handle


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = local_tensor(parameter.grad)
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _mark_nonfinite(gradients: Iterable[torch.Tensor]) -> None:
    """Writes a NaN, so that a GradScaler on any rank sees that a gradient of its replica is not finite."""
    for gradient in gradients:
        if gradient.numel():
            gradient[(0,) * gradient.ndim] = float("nan")
            return
