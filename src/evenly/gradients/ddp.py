"""Gradients inside a node: torch's DDP with a communication hook that weights by samples and checks finiteness.

DDP's reducer is prepared at all times, so that it sees every backward, also those without a forward of the synchronized
model. The forwards that a backward passes through decide whether it is averaged, and with what weight.
"""

from collections.abc import Sequence
from typing import final
from weakref import ref

import torch
from torch.nn.parallel import DistributedDataParallel

from evenly._torch import reducer
from evenly._torch.autograd import at_end_of_backward, in_backward, will_reach
from evenly._torch.process_groups import GradBucket
from evenly.comm import FailureMonitor, Group, plain_group
from evenly.errors import SpecError
from evenly.gradients.base import Gradients
from evenly.gradients.buckets import BucketAveraging
from evenly.gradients.forwards import Forward, uncounted
from evenly.gradients.verdicts import LastVerdicts, Verdict


@final
class DdpGradients(Gradients):
    """Averages the gradients of `module` over `group` at every backward, weighted by the samples of each rank.

    With b_r samples on rank r, whose loss is a mean, the result is sum_r b_r g_r / sum_r b_r: the gradient of the mean
    over all samples. A rank with no samples adds nothing.
    """

    _is_closed = False

    def __init__(
        self,
        module: torch.nn.Module,
        group: Group,
        *,
        monitor: FailureMonitor,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__(module, group, monitor)
        self._module = module
        self._finds_unused = find_unused_parameters
        self._averaging: BucketAveraging | None = None
        self._buckets: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # only if they may be restored
        self._verdicts = LastVerdicts()
        for parameter in module.parameters():
            parameter.grad = None  # it was not averaged
        self._wrap()

    def _wrap(self) -> None:
        """Wraps the module in a new DDP, over the parameters that are trained now; all ranks call it together."""
        gradients = [parameter.grad for parameter in self._trained]
        for parameter in self._trained:
            parameter.grad = None  # DDP would make it a view of a bucket, into which the dry run writes
        self._wrapped = _DdpModule(self._module)
        self._ddp = DistributedDataParallel(
            self._wrapped,
            process_group=plain_group(self._group),
            init_sync=False,
            gradient_as_bucket_view=True,
            **reducer.no_buffer_broadcast(),
        )
        self._ddp.register_comm_hook(ref(self), _average)  # a strong reference would keep DDP and the group alive
        self._build_buckets()
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient
        self._without_gradient: list[int] = []  # indices of parameters without one when buckets were sent
        self._missing: list[int] = []  # indices of parameters without a gradient after a backward to be averaged
        self._missing_samples = 0.0  # the samples of that backward
        self._prepare()

    def _follow(self) -> None:
        """Builds the buckets of the parameters that are trained now; gradients that exist stay as they are."""
        self._require_complete()
        reducer.remove_hooks(self._ddp)
        self._read_parameters(self._module)
        self._buckets = []
        self._wrap()
        self._record_gradients()

    def forward(self, samples: float, *args: object, **kwargs: object) -> object:
        """Runs the module on a batch of `samples` samples."""
        if not in_backward():  # inside, an activation checkpoint recomputes it
            self._require_complete()
            self._forget_abandoned()
        forward = self._log.begin(samples, is_averaged=not self._is_paused)
        output = self._module(*args, **kwargs)  # skips DDP's own forward, which is not needed
        self._log.watch(forward, output, inputs=(*args, *kwargs.values()))
        return output

    def _prepare(self) -> None:
        """Prepares DDP's reducer for the next backward, whatever causes it."""
        self._ready_times = reducer.prepare_backward(self._ddp)
        self._is_prepared = True  # until the last bucket is complete

    def _queue_finish(self) -> None:
        """Queues `_finish_backward` behind DDP's own callbacks for the end of this backward."""
        at_end_of_backward(self._finish_backward)

    def _finish_backward(self) -> None:
        """Runs at the end of a complete backward, when all gradients are averaged."""
        unused = self._without_gradient
        if self._averaging is not None:
            unused = self._averaging.unused(unused)
            self._averaging.release()
        for index in unused:
            self._trained[index].grad = None  # DDP wrote zeros
        self._averaging, self._without_gradient = None, []
        self._record_gradients()
        self._prepare()

    def _build_buckets(self) -> None:
        """Makes DDP build its final buckets now, in an order that depends on the module alone.

        DDP would rebuild its buckets after the first real backward, and with them the order of the sums: a resumed run
        would then differ from an uninterrupted one in the last bits of one step.
        """
        self._wrapped.is_dry_run = True
        with torch.enable_grad():
            self._ddp().backward()
        reducer.rebuild_buckets(self._ddp)
        self._wrapped.is_dry_run = False

    def take_verdict(self, *, may_stall: bool) -> Verdict | None:
        """Returns the last backward's verdict, once. If reading it would stall a device, and it may not, returns that
        of the backward before."""
        return self._verdicts.take(may_stall=may_stall)

    def close(self) -> None:
        """Removes DDP's hooks from the parameters, which may be trained without it."""
        if not self._is_closed:
            self._is_closed = True
            reducer.remove_hooks(self._ddp)

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts averaging a bucket; leaves it unchanged in no_sync() and in backwards without a forward."""
        if self._wrapped.is_dry_run:
            return _done(bucket.buffer())
        if bucket.index() == 0:
            self._begin_backward()
        if self._averaging is None:
            future = _done(bucket.buffer())
        else:
            future = self._averaging.add(bucket.buffer(), is_last=bucket.is_last())
        if self._before is not None:  # gradients may have to be restored
            self._buckets.append((bucket.parameters(), bucket.gradients()))
        if bucket.is_last():
            self._end_backward()
        return future

    def _begin_backward(self) -> None:
        """Runs at the first bucket; the forwards of the backward may be known only at the last one."""
        forwards = self._log.members()
        is_known = bool(forwards) and not self._log.may_grow
        self._averaging, self._buckets = None, []
        if not is_known or any(forward.is_averaged for forward in forwards):
            self._averaging = BucketAveraging(self._group, self._monitor, step=self.step)
            if is_known and all(forward.samples for forward in forwards):
                self._start(self._averaging, forwards)

    def _start(self, averaging: BucketAveraging, forwards: Sequence[Forward]) -> None:
        if not averaging.has_started:
            self._monitor.count_backward()
            averaging.start(self._samples_to_average(forwards))

    def _end_backward(self) -> None:
        """Runs at the last bucket."""
        self._is_prepared = False
        at_end_of_backward(self._queue_finish)
        forwards = self._log.members()  # complete: all gradients are ready
        if self._missing and self._missing_samples != sum(forward.samples for forward in forwards):
            raise self._reported(SpecError(self._incomplete("backward()", self._named(self._missing))))
        adds_nothing = self._adds_nothing(forwards)
        has_gradient = self._has_gradient(adds_nothing=adds_nothing) if self._finds_unused else []
        self._without_gradient = [index for index, is_used in enumerate(has_gradient) if not is_used]
        if adds_nothing:
            for parameters, gradients in self._buckets:
                self._restore(parameters, gradients)
        self._before = None
        self._buckets = []
        self._missing = []
        if self._averaging is not None and any(forward.is_averaged for forward in forwards):
            self._send(self._averaging, forwards, has_gradient)
        else:
            if self._averaging is not None:
                self._averaging.cancel()
                self._averaging = None
            self._record_local(forwards)
        self._log.complete()

    def _has_gradient(self, *, adds_nothing: bool) -> list[bool]:
        """Returns which parameters have a gradient; a batch without samples gives none."""
        before = self._before or {}
        return [id(p) in before if adds_nothing else p.grad is not None for p in self._trained]

    def _send(self, averaging: BucketAveraging, forwards: Sequence[Forward], has_gradient: list[bool]) -> None:
        if self.on_backward_done is not None:
            self.on_backward_done()
        self._start(averaging, forwards)
        averaging.finish(has_gradient)
        at_end_of_backward(averaging.complete)  # before DDP waits for its buckets
        ranks = self._group.size()
        self.sent_bytes += 2 * (ranks - 1) * averaging.nbytes // ranks
        self._verdicts.record(averaging)
        self._record_averaged(averaging.samples, uncounted([*self._log.reached_since(), *forwards]))

    def begin_task(self) -> None:
        """Runs when a backward reaches a forward; its loss or other backwards may have used parameters before."""
        if self._missing:
            reached = [p for index, p in enumerate(self._trained) if index not in self._missing]
            if any(map(will_reach, reached)):
                raise self._reported(SpecError(self._incomplete("backward()", self._named(self._missing))))
        elif unready := set(self._unready()):
            ready = [p for index, p in enumerate(self._trained) if index not in unready]
            if not all(map(will_reach, ready)):
                self._end_local([])
        super().begin_task()

    def end_task(self) -> None:
        """Runs at the end of a backward that has reached a forward."""
        unready = self._unready()
        if not unready and self._is_prepared:  # after a complete one there is nothing to forget
            self._log.forget_members()
        elif unready:
            forwards = self._log.members()
            if not any(forward.is_averaged for forward in forwards):  # a loss may use only some parameters
                self._end_local(forwards)
            elif self._finds_unused:
                self._mark_unused(unready)
            else:
                self._missing, self._missing_samples = unready, sum(forward.samples for forward in forwards)
                self._record_gradients()

    def _mark_unused(self, indices: Sequence[int]) -> None:
        """Marks parameters without a gradient in the running backward as ready, so that DDP completes."""
        failure: RuntimeError | None = None
        for index in indices:
            try:
                reducer.mark_ready(self._ddp, index)
            except RuntimeError as error:  # it was ready, with the same time stamp as in the backward before
                failure = failure or error
        if failure is not None and self._is_prepared:
            raise failure

    def _end_local(self, forwards: Sequence[Forward]) -> None:
        """Ends a backward that gave only some gradients and is not averaged; without a forward `forwards` is empty."""
        if self._adds_nothing(forwards):
            untouched = set(map(id, self._untouched()))
            changed = [p for p in self._trained if p.grad is not None and id(p) not in untouched]
            self._restore(changed, [p.grad for p in changed if p.grad is not None])
            for parameter in changed:
                if id(parameter) not in (self._before or {}):
                    parameter.grad = None  # as before
        self._before = None
        self._record_local(forwards)
        self._log.complete()
        self._record_gradients()
        self._prepare()

    def _require_complete(self) -> None:
        """Raises `SpecError` if a backward to be averaged left parameters without a gradient."""
        if unready := self._unready():
            reached = self._log.reached_since()
            if any(forward.is_averaged for forward in reached):
                raise self._reported(SpecError(self._incomplete("forward", self._named(unready))))
            self._end_local(reached)

    def require_averaged(self) -> None:
        """Raises `SpecError` unless all gradients that a step is about to use are the same on all ranks of the node."""
        if unready := self._unready():
            if any(forward.is_averaged for forward in self._log.reached_since()):
                raise SpecError(self._incomplete("optimizer.step()", self._named(unready)))
            self._end_local([])
        super().require_averaged()

    def _unready(self) -> list[int]:
        """Returns the indices of parameters without a gradient if others got one since DDP was prepared."""
        if not self._is_prepared:
            return []
        times = reducer.ready_times(self._ddp)
        if times == self._ready_times:
            return []
        pairs = zip(times, self._ready_times, strict=True)
        return [index for index, (now, before) in enumerate(pairs) if now == before]

    def _untouched(self) -> Sequence[torch.Tensor]:
        unready = self._unready()
        return [self._trained[index] for index in unready] if unready else self._trained

    def _named(self, indices: Sequence[int]) -> list[str]:
        return [self._names[index] for index in indices]


def _average(owner: "ref[DdpGradients]", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = owner()
    if gradients is None:
        raise SpecError("backward was called after the synchronized model was deleted. Keep it as long as its losses.")
    return gradients.average(bucket)


def _done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.is_cuda else None
    )
    future.set_result(buffer)
    return future


def _touch(module: torch.nn.Module) -> torch.Tensor:
    """Returns a number that depends on every trained parameter."""
    return torch.stack([p.sum().real.double() for p in module.parameters() if p.requires_grad]).sum()


class _DdpModule(torch.nn.Module):
    """The module that DDP wraps; in a dry run its output uses every parameter."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.is_dry_run = False

    def forward(self, *args: object, **kwargs: object) -> object:
        return _touch(self.module) if self.is_dry_run else self.module(*args, **kwargs)
