"""Gradients inside a node: torch's DDP with a hook that weights by samples and finds what is not finite.

DDP's reducer is kept armed at all times, so that no backward escapes it: one that the synchronized model did not cause
is seen too. Whether a backward is averaged, and with what weight, say the forwards it has passed through.
"""

from collections.abc import Sequence
from typing import Any, final
from weakref import ref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evenly._torch import reducer
from evenly._torch.autograd import at_end_of_backward, in_backward, will_reach
from evenly._torch.process_groups import GradBucket
from evenly.comm import FailureMonitor
from evenly.errors import SpecError
from evenly.gradients.base import Gradients
from evenly.gradients.buckets import BucketAveraging
from evenly.gradients.forwards import Forward, uncounted


@final
class NodeGradients(Gradients):
    """Averages the gradients of `module` over `group` at every backward, weighted by the samples of each rank.

    With b_r samples on rank r, whose loss is a mean, the result is sum_r b_r g_r / sum_r b_r: the gradient of the mean
    over all samples. A rank with no samples adds nothing.
    """

    _is_closed = False

    def __init__(
        self,
        module: torch.nn.Module,
        group: dist.ProcessGroup,
        *,
        monitor: FailureMonitor,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__(module, group, monitor)
        self._module = module
        self._finds_unused = find_unused_parameters
        self._averaging: BucketAveraging | None = None
        self._buckets: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # where they may have to be restored
        self._latest: BucketAveraging | None = None
        self._earlier: BucketAveraging | None = None
        self._body = _Body(module)
        self._ddp = DistributedDataParallel(
            self._body,
            process_group=group,
            init_sync=False,
            gradient_as_bucket_view=True,
            **reducer.without_buffers(),
        )
        self._ddp.register_comm_hook(ref(self), _average)  # DDP would keep itself and the group alive for ever
        self._rehearse()
        self._without_gradient: list[int] = []  # places of parameters that had none when buckets were sent
        self._left: list[int] = []  # places of parameters without a gradient after a backward that is to be averaged
        self._left_samples = 0.0  # the samples of that backward
        self._arm()

    def forward(self, samples: float, *args: Any, **kwargs: Any) -> Any:
        """Runs the module on a batch of `samples` samples."""
        if not in_backward():  # there an activation checkpoint runs it again
            self._require_complete()
            self._forget_abandoned()
        forward = self._log.begin(samples, is_averaged=not self._is_paused)
        output = self._module(*args, **kwargs)  # without DDP's own forward, which would only take time
        self._log.watch(forward, output, given=(*args, *kwargs.values()))
        return output

    def _arm(self) -> None:
        """Lets the next backward, whatever causes it, go through DDP's buckets."""
        self._times = reducer.arm(self._ddp)
        self._is_armed = True  # until the last bucket is complete

    def _rearm(self) -> None:
        """Goes behind what DDP itself has queued for the end of this backward."""
        at_end_of_backward(self._settle)

    def _settle(self) -> None:
        """Runs at the end of a complete backward, when all gradients are averaged."""
        unused = self._without_gradient
        if self._averaging is not None:
            unused = self._averaging.unused(unused)
            self._averaging.release()
        for place in unused:
            self._trained[place].grad = None  # DDP has put zeros there
        self._averaging, self._without_gradient = None, []
        self._note_gradients()
        self._arm()

    def _rehearse(self) -> None:
        """Makes DDP settle its buckets now, in an order that depends on the module alone.

        DDP would lay its buckets out anew after the first real backward, and with them the order in which ranks are
        summed: a resumed run would then differ from one that was not interrupted, in the last bits of one step.
        """
        self._body.rehearsing = True
        self._ddp().backward()
        reducer.rebuild_buckets(self._ddp)
        self._body.rehearsing = False
        for parameter in self._body.parameters():
            parameter.grad = None

    def last(self, *, now: bool) -> BucketAveraging | None:
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
        """Takes DDP's hooks off the parameters, which may train on without it."""
        if not self._is_closed:
            self._is_closed = True
            reducer.remove_hooks(self._ddp)

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begins to average a bucket of gradients; leaves it as it is in no_sync() and in backwards of others."""
        if self._body.rehearsing:
            return _done(bucket.buffer())
        if bucket.index() == 0:
            self._begin_backward()
        future = _done(bucket.buffer()) if self._averaging is None else self._averaging.add(bucket.buffer())
        if self._before is not None:  # gradients may have to be restored
            self._buckets.append((bucket.parameters(), bucket.gradients()))
        if bucket.is_last():
            self._end_backward(bucket.buffer().device)
        return future

    def _begin_backward(self) -> None:
        """Runs at the first bucket: which forwards the backward belongs to may be known only at the last one."""
        forwards = self._log.members()
        is_known = bool(forwards) and not self._log.may_grow
        self._averaging, self._buckets = None, []
        if not is_known or any(forward.is_averaged for forward in forwards):
            self._averaging = BucketAveraging(self._group, self._monitor, step=self.step)
            if is_known and all(forward.samples for forward in forwards):
                self._start(self._averaging, forwards)

    def _start(self, averaging: BucketAveraging, forwards: Sequence[Forward]) -> None:
        if not averaging.has_started:
            self._monitor.begin()
            averaging.start(self._weight(forwards))

    def _end_backward(self, device: torch.device) -> None:
        """Runs at the last bucket."""
        self._is_armed = False
        at_end_of_backward(self._rearm)
        forwards = self._log.members()  # all of them: the last gradient is there
        if self._left and self._left_samples != sum(forward.samples for forward in forwards):
            raise self._told(SpecError(self._incomplete("backward()", self._named(self._left))))
        is_borrowed = self._is_borrowed(forwards)
        held = self._held(is_borrowed=is_borrowed) if self._finds_unused else []
        self._without_gradient = [place for place, is_held in enumerate(held) if not is_held] if held else []
        if is_borrowed:
            for parameters, gradients in self._buckets:
                self._restore(parameters, gradients)
        self._before = None
        self._buckets = []
        self._left = []
        if self._averaging is not None and any(forward.is_averaged for forward in forwards):
            self._send(self._averaging, forwards, held, device)
        else:
            if self._averaging is not None:
                self._averaging.leave()
                self._averaging = None
            self._kept_local(forwards)
        self._log.complete()

    def _held(self, *, is_borrowed: bool) -> list[bool]:
        """Returns which parameters have a gradient; a batch without samples gives none."""
        before = self._before or {}
        return [id(p) in before if is_borrowed else p.grad is not None for p in self._trained]

    def _send(
        self, averaging: BucketAveraging, forwards: Sequence[Forward], held: list[bool], device: torch.device
    ) -> None:
        if self.on_backward_done is not None:
            self.on_backward_done()
        self._start(averaging, forwards)
        averaging.close(device, held)
        ranks = self._group.size()
        self.sent_bytes += 2 * (ranks - 1) * averaging.nbytes // ranks
        self._latest = averaging
        self._was_averaged(averaging.samples, uncounted([*self._log.reached_since(), *forwards]))

    def begin_task(self) -> None:
        """Runs when a backward reaches a forward: parameters may be ready before, by its loss or other backwards."""
        if self._left:
            given = [p for place, p in enumerate(self._trained) if place not in self._left]
            if any(map(will_reach, given)):
                raise self._told(SpecError(self._incomplete("backward()", self._named(self._left))))
        elif unready := set(self._unready()):
            ready = [p for place, p in enumerate(self._trained) if place not in unready]
            if not all(map(will_reach, ready)):
                self._keep_part([])
        super().begin_task()

    def end_task(self) -> None:
        """Runs at the end of a backward that has reached a forward."""
        if unready := self._unready():
            forwards = self._log.members()
            if not any(forward.is_averaged for forward in forwards):  # a loss may use some parameters only
                self._keep_part(forwards)
            elif self._finds_unused:
                self._do_without(unready)
            else:
                self._left, self._left_samples = unready, sum(forward.samples for forward in forwards)
                self._note_gradients()

    def _do_without(self, places: Sequence[int]) -> None:
        """Lets DDP go on without the gradients that the running backward does not give."""
        failure: RuntimeError | None = None
        for place in places:
            try:
                reducer.mark_ready(self._ddp, place)
            except RuntimeError as error:  # it was ready, after as many nanoseconds as in the backward before
                failure = failure or error
        if failure is not None and self._is_armed:
            raise failure

    def _keep_part(self, forwards: Sequence[Forward]) -> None:
        """Ends a backward that has given some gradients and is not averaged; none of `forwards` if it is not ours."""
        if self._is_borrowed(forwards):
            untouched = set(map(id, self._untouched()))
            given = [p for p in self._trained if p.grad is not None and id(p) not in untouched]
            self._restore(given, [p.grad for p in given if p.grad is not None])
            for parameter in given:
                if id(parameter) not in (self._before or {}):
                    parameter.grad = None  # as it was
        self._before = None
        self._kept_local(forwards)
        self._log.complete()
        self._note_gradients()
        self._arm()

    def _require_complete(self) -> None:
        """Raises `SpecError` where a backward that is to be averaged has left parameters without a gradient."""
        if unready := self._unready():
            reached = self._log.reached_since()
            if any(forward.is_averaged for forward in reached):
                raise self._told(SpecError(self._incomplete("forward", self._named(unready))))
            self._keep_part(reached)

    def require_averaged(self) -> None:
        """Raises `SpecError` unless all gradients that a step is about to use are the same on all ranks of the node."""
        if unready := self._unready():
            if any(forward.is_averaged for forward in self._log.reached_since()):
                raise SpecError(self._incomplete("optimizer.step()", self._named(unready)))
            self._keep_part([])
        super().require_averaged()

    def _unready(self) -> list[int]:
        """Returns the places of the parameters without a gradient where DDP, since it was armed, has seen others."""
        if not self._is_armed:
            return []
        times = reducer.ready_times(self._ddp)
        if times == self._times:
            return []
        return [place for place, (now, before) in enumerate(zip(times, self._times, strict=True)) if now == before]

    def _untouched(self) -> Sequence[torch.Tensor]:
        unready = self._unready()
        return [self._trained[place] for place in unready] if unready else self._trained

    def _named(self, places: Sequence[int]) -> list[str]:
        return [self._names[place] for place in places]


def _average(owner: "ref[NodeGradients]", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = owner()
    if gradients is None:
        raise SpecError("backward was called after the synchronized model was let go. Keep it as long as its losses.")
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


class _Body(torch.nn.Module):
    """What DDP wraps: the module itself, or a rehearsal that touches every parameter."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.rehearsing = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _touch(self.module) if self.rehearsing else self.module(*args, **kwargs)
