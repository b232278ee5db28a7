"""Gradients inside a node: torch's DDP with a hook that weights by samples and finds what is not finite."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final
from weakref import ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from evenly._errors import SpecError
from evenly.comm import Alarm
from evenly.nodes.averaging import Averaging
from evenly.nodes.sharing import Gradients


@final
class NodeGradients(Gradients):
    """Averages the gradients of `module` over `group` at every backward, weighted by the samples of each rank.

    With b_r samples on rank r, whose loss is a mean, the result is sum_r b_r g_r / sum_r b_r: the gradient of the mean
    over all samples. A rank with no samples adds nothing.
    """

    def __init__(
        self, module: torch.nn.Module, group: dist.ProcessGroup, *, alarm: Alarm, find_unused_parameters: bool = False
    ) -> None:
        self._group, self._alarm = group, alarm
        self._accumulated = self._current = self._averaged = 0.0
        self._latest: Averaging | None = None
        self._earlier: Averaging | None = None
        self._body = _Body(module)
        self._ddp = DistributedDataParallel(
            self._body,
            process_group=group,
            init_sync=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
            **_local_buffers(),
        )
        self._ddp.register_comm_hook(ref(self), _average)  # DDP would keep itself and the group alive for ever
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
        self._ddp.reducer._rebuild_buckets()  # a collective: later it would wait for ranks that never call forward
        self._body.rehearsing = self.pending = False
        self._latest, self._alarm.begun, self.sent_bytes = None, 0, 0
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

    def last(self, *, now: bool) -> Averaging | None:
        """Returns the last backward's averaging, once, to ask whether all gradients were finite.

        Where reading the answer would stall a device it is that of the backward before, unless it is wanted `now`.
        """
        latest, self._latest = self._latest, None
        if latest is None or now or latest.immediate:
            earlier, self._earlier = self._earlier, None
            return latest or earlier
        latest.fetch()
        earlier, self._earlier = self._earlier, latest
        return earlier

    def close(self) -> None:
        """DDP goes with the object."""

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begins to average a bucket of gradients."""
        if bucket.index() == 0:
            self._alarm.begin()
            samples = self._accumulated + self._current
            self._averaging = Averaging(self._group, self._alarm, samples=samples, step=self.step)
        ranks = self._group.size()
        self.sent_bytes += 2 * (ranks - 1) * bucket.buffer().nbytes // ranks
        future = self._averaging.add(bucket.buffer())
        if bucket.is_last():
            if self.clock is not None:
                self.clock.end()
            self._averaging.close(bucket.buffer().device)
            self._latest, self.pending = self._averaging, True
            self._averaged += self._averaging.samples
            self._accumulated = self._current = 0.0
        return future


def _average(owner: "ref[NodeGradients]", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = owner()
    if gradients is None:
        raise SpecError("backward was called after the synchronized model was let go. Keep it as long as its losses.")
    return gradients.average(bucket)


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


def _local_buffers() -> dict[str, Any]:
    """Returns DDP's argument, whatever its name in this version of torch, that keeps buffers from travelling."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
