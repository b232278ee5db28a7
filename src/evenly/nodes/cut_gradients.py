"""Gradients of replicas that are cut over ranks: averaged at the end of every backward, in global coordinates."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from evenly._errors import MismatchError
from evenly.comm import Alarm, Waiter, all_reduce
from evenly.nodes.meeting import Meeting
from evenly.nodes.replicas import Replica
from evenly.nodes.sharing import Gradients


@dataclass(frozen=True)
class Tally:
    """What the ranks that share gradients said at the end of one backward."""

    step: int
    nonfinite: tuple[int, ...]  # members whose gradients were not finite

    def nonfinite_members(self) -> list[int]:
        """Returns the members of the group whose gradients were not finite."""
        return list(self.nonfinite)


@final
class ReplicaGradients(Gradients):
    """Averages the gradients of replicas: sum_R b_R g_R / sum_R b_R, with b_R samples in the batch of replica R.

    One small message at the end of backward tells all ranks that share gradients the samples of each, which parameters
    have a gradient, and whether all is finite. Gradients themselves travel between replicas only.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        meeting: Meeting,
        group: dist.ProcessGroup,
        *,
        ranks: Sequence[int],
        replicas: Sequence[Replica],
        alarm: Alarm,
        timeout_s: float,
    ) -> None:
        self._module, self._meeting, self._group, self._alarm = module, meeting, group, alarm
        self._timeout_s = timeout_s
        self._ranks = tuple(ranks)
        self._replicas = [[self._ranks.index(rank) for rank in replica.everybody] for replica in replicas]
        self._first = any(alarm.party.rank == replica.ranks[0] for replica in replicas)
        self._listens = any(alarm.party.rank in replica.audience for replica in replicas)
        self._accumulated = self._current = self._averaged = self._weight = 0.0
        self._fresh = self._begun = self._queued = self._is_paused = self._waits = False
        self._latest: Tally | None = None
        self._hooks = [_on_gradient(p, self._arrived) for p in module.parameters() if p.requires_grad]

    def forward(self, samples: float, *args: Any, **kwargs: Any) -> Any:
        """Runs the module on a batch of `samples` samples; all ranks of the replica meet in it."""
        if not self._begun:
            self._begun = True
            self._alarm.begin()
        self._waits, self._queued, self._fresh = self._is_paused, False, True
        if self._is_paused:
            self._accumulated += samples
        else:
            self._current = samples
        try:
            return self._module(*args, **kwargs)
        except Exception as error:
            self._alarm.ring(error)
            raise

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps gradients of replicas apart; they accumulate until the next backward outside."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def take_samples(self) -> float:
        """Returns the samples averaged since the last call; the first rank of a replica answers for its batch."""
        samples, self._averaged, self.pending = self._averaged, 0.0, False
        return samples if self._first else 0.0

    def last(self, *, now: bool) -> Tally | None:
        """Returns what the last backward's ranks said, once."""
        latest, self._latest = self._latest, None
        return latest

    def follow(self, meeting: Meeting) -> None:
        """Goes on with the parameters that the module has now, which meet in `meeting`."""
        self.close()
        self._meeting = meeting
        self._hooks = [_on_gradient(p, self._arrived) for p in self._module.parameters() if p.requires_grad]

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self._queued and not self._waits:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        """Runs when all gradients of a backward are there."""
        self._queued = self._begun = False
        if self.clock is not None:
            self.clock.end()
        if self._fresh:  # a second backward through the same batch has its weight, and adds no samples
            self._weight = self._accumulated + self._current
            self._averaged += self._weight
        self._accumulated = self._current = 0.0
        self._fresh = False
        waiter = Waiter(
            self._alarm, place=f"the gradients of step {self.step}", step=self.step - 1, timeout_s=self._timeout_s
        )
        try:
            self._meet(waiter)
        except Exception as error:
            self._alarm.ring(error)
            raise
        self.pending = True

    def _meet(self, waiter: Waiter) -> None:
        trained = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        held = {name: p.grad for name, p in trained.items() if p.grad is not None}
        if self._weight == 0:
            for gradient in held.values():
                gradient.zero_()  # the mean over no samples is NaN
        samples, nonfinite, used = self._exchange_tally(list(trained), held, waiter)
        self._latest = Tally(self.step, tuple(nonfinite))
        if nonfinite:
            _spoil(held.values())
        elif self._meeting.sides > 1:
            gradients = {name: _gradient(p) for name, p in trained.items() if name in used}
            summed = [(name, g.float() if g.dtype.itemsize < 4 else g) for name, g in gradients.items()]
            self.sent_bytes += self._meeting.reduce(summed, waiter, weight=self._weight / samples if samples else 0.0)
            self._meeting.spread(summed, waiter)
            for (_, value), gradient in zip(summed, gradients.values(), strict=True):
                if value is not gradient:
                    gradient.copy_(value)

    def _exchange_tally(
        self, names: list[str], held: dict[str, torch.Tensor], waiter: Waiter
    ) -> tuple[float, list[int], set[str]]:
        """Returns the samples of all replicas, the members whose gradients are not finite, the parameters used."""
        size = len(self._ranks)
        device = next(self._module.parameters()).device
        tally = torch.zeros(2 * size + len(names), dtype=torch.float64, device=device)
        place = self._ranks.index(self._alarm.party.rank)
        tally[size + place] = self._weight
        if not self._listens:
            tally[2 * size :] = torch.tensor([name in held for name in names], dtype=torch.float64)
        if held and self._weight:
            sums = [torch.sum(g, dtype=torch.float32 if g.dtype.itemsize < 4 else None) for g in held.values()]
            tally[place] = (~torch.isfinite(torch.stack([s.double().real for s in sums]).sum())).double()
        if size > 1:
            waiter.wait([all_reduce(tally, self._group)])
        told = tally.tolist()
        counts = told[size : 2 * size]
        self._require_one_count(counts)
        return (
            sum(counts[members[0]] for members in self._replicas),
            [member for member, bad in enumerate(told[:size]) if bad],
            {name for name, used in zip(names, told[2 * size :], strict=True) if used},
        )

    def _require_one_count(self, counts: list[float]) -> None:
        for members in self._replicas:
            if len({counts[member] for member in members}) > 1:
                said = ", ".join(f"rank {self._ranks[member]}: {counts[member]:g}" for member in members)
                raise MismatchError(
                    f"the ranks of one network were given batches of unequal numbers of samples in step {self.step} "
                    f"({said}). Give all ranks that hold one network together the same batch."
                )


def _on_gradient(parameter: torch.Tensor, act: Callable[[torch.Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(act)  # type: ignore[no-untyped-call]  # torch has no annotation here
    return handle


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return torch.view_as_real(parameter.grad) if parameter.grad.is_complex() else parameter.grad


def _spoil(gradients: Iterable[torch.Tensor]) -> None:
    """Lets a GradScaler on any rank see that a gradient of its replica is not finite."""
    for gradient in gradients:
        if gradient.numel():
            gradient[(0,) * gradient.ndim] = float("nan")
            return
