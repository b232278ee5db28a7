"""Gradients inside a node: torch's DDP with a hook that weights by samples and finds what is not finite."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from evenly._errors import PeerError
from evenly.comm import Alarm, Waiter, all_reduce, first_line


class NodeGradients:
    """Averages the gradients of `module` over `group` at every backward, weighted by the samples of each rank.

    With b_r samples on rank r, whose loss is a mean, the result is sum_r b_r g_r / sum_r b_r: the gradient of the mean
    over all samples. A rank with no samples adds nothing.
    """

    def __init__(
        self, module: torch.nn.Module, group: dist.ProcessGroup, *, alarm: Alarm, find_unused_parameters: bool = False
    ) -> None:
        self.step = 1  # the step that the next backward belongs to
        self.pending = False  # a backward was averaged and no step has used it yet
        self._group, self._alarm = group, alarm
        self._accumulated = self._current = self._averaged = 0.0
        self._latest: Verdict | None = None
        self._earlier: Verdict | None = None
        self._body = _Body(module)
        self._ddp = DistributedDataParallel(
            self._body,
            process_group=group,
            init_sync=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
            **_local_buffers(),
        )
        self._ddp.register_comm_hook(None, self._average)
        if group.size() > 1 and not find_unused_parameters:
            self._rehearse()

    def forward(self, samples: float, *args: Any, **kwargs: Any) -> Any:
        """Runs the module on a batch of `samples` samples."""
        if self._ddp.require_backward_grad_sync:
            self._current = samples
        else:
            self._accumulated += samples
        return self._ddp(*args, **kwargs)

    def _rehearse(self) -> None:
        """Makes DDP settle its buckets now, in an order that depends on the module alone.

        DDP would lay its buckets out anew after the first real backward, and with them the order in which ranks are
        summed: a resumed run would then differ from one that was not interrupted, in the last bits of one step.
        """
        self._body.rehearsing = True
        self._ddp().backward()
        self._body.rehearsing = self.pending = False
        self._latest, self._alarm.begun = None, 0
        for parameter in self._body.parameters():
            parameter.grad = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps gradients local; they accumulate until the next backward outside."""
        with self._ddp.no_sync():
            yield

    def take_samples(self) -> float:
        """Returns the samples behind the gradients averaged since the last call."""
        samples, self._averaged, self.pending = self._averaged, 0.0, False
        return samples

    def verdict(self, *, now: bool) -> "Verdict | None":
        """Returns which members had gradients that are not finite, or None if that is not known yet.

        On a CPU the answer is of the last backward. Elsewhere reading it would stall the device, so unless it is wanted
        `now` the answer is of the backward before.
        """
        latest, self._latest = self._latest, None
        if latest is not None:
            latest.fetch()
        if latest is None or now or latest.immediate:
            self._earlier, answer = None, latest or self._earlier
        else:
            self._earlier, answer = latest, self._earlier
        return answer

    def _average(self, state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._begin(buffer.device)
        alone = self._group.size() == 1
        if self._samples == 0:
            buffer.zero_()  # 0 * NaN would not be 0
        else:
            self._check.add_(torch.sum(buffer, dtype=torch.float32 if buffer.dtype.itemsize < 4 else None))
            if not alone:
                buffer.mul_(self._samples)
        future = self._deliver(buffer, None if alone else all_reduce(buffer, self._group))
        if bucket.is_last():
            self._end()
        return future

    def _begin(self, device: torch.device) -> None:
        self._alarm.begun += 1
        self._samples = self._accumulated + self._current
        self._check = torch.zeros((), dtype=torch.float64, device=device)
        self._total = torch.full((1,), self._samples, dtype=torch.float64, device=device)
        self._total_work = all_reduce(self._total, self._group) if self._group.size() > 1 else None

    def _end(self) -> None:
        flags = torch.zeros(self._group.size(), device=self._check.device)  # [members]
        flags[self._group.rank()] = (~torch.isfinite(self._check)).float()
        work = all_reduce(flags, self._group) if self._group.size() > 1 else None
        self._latest = Verdict(flags, work, self._alarm, self.step)
        self._accumulated = self._current = 0.0
        self._averaged += self._samples
        self.pending = True

    def _deliver(self, buffer: torch.Tensor, work: dist.Work | None) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        if work is None:
            future.set_result(buffer)
            return future
        self._alarm.hold(future, buffer)
        finish = partial(self._finish, future, buffer, self._total, self._total_work)
        work.get_future().add_done_callback(finish)
        return future

    def _finish(
        self,
        future: torch.futures.Future[torch.Tensor],
        buffer: torch.Tensor,
        total: torch.Tensor,
        total_work: dist.Work | None,
        reduced: torch.futures.Future[Any],
    ) -> None:
        try:
            reduced.value()
            if total_work is not None:
                total_work.wait()
            _divide(buffer, total.clamp_min(1))
        except RuntimeError as error:
            self._alarm.settle_cause()
            self._alarm.fail(
                PeerError(
                    f"rank {self._alarm.party.rank} lost the connection to another rank of its node while gradients "
                    f"were averaged: {first_line(error)}. That rank has ended or cannot be reached; look at its output."
                )
            )
        self._alarm.release(future, buffer)


class _Body(torch.nn.Module):
    """What DDP wraps: the module itself, or a rehearsal that touches every parameter."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.rehearsing = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.rehearsing:
            return self.module(*args, **kwargs)
        return torch.stack([p.sum().real.double() for p in self.parameters() if p.requires_grad]).sum()


class Verdict:
    """Which members of a group had gradients that are not finite; fetched without stalling the device."""

    def __init__(self, flags: torch.Tensor, work: dist.Work | None, alarm: Alarm, step: int) -> None:
        self.step = step
        self.immediate = not flags.is_cuda
        self._flags, self._work, self._alarm = flags, work, alarm
        self._event: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Starts the copy to the host."""
        if self._work is not None:
            Waiter(self._alarm, place="the averaging of gradients", step=self.step).wait([self._work])
        if not self.immediate:
            self._flags = self._flags.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation here
            self._event.record()

    def members(self) -> list[int]:
        """Returns the members of the group whose gradients were not finite."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._flags.nonzero().flatten().tolist()
        return found


def _divide(buffer: torch.Tensor, divisor: torch.Tensor) -> None:
    if buffer.dtype.itemsize < 4:  # the divisor itself may not fit into 8 bits of mantissa
        buffer.copy_(buffer.float().div_(divisor))
    else:
        buffer.div_(divisor)


def _local_buffers() -> dict[str, Any]:
    """Returns DDP's argument, whatever its name in this version of torch, that keeps buffers from travelling."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
