"""Gradients inside a node: torch's DDP with a hook that weights by samples and finds what is not finite.

DDP's reducer is kept armed at all times, so that no backward escapes it: one that the synchronized model did not cause
is seen too. Whether a backward is averaged, and with what weight, say the forwards it has passed through.
"""

import inspect
import re
from typing import Any, final
from weakref import ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from evenly._errors import SpecError
from evenly.comm import Alarm
from evenly.nodes.averaged import Gradients
from evenly.nodes.averaging import Averaging
from evenly.nodes.forwards import ForwardLog, uncounted


@final
class NodeGradients(Gradients):
    """Averages the gradients of `module` over `group` at every backward, weighted by the samples of each rank.

    With b_r samples on rank r, whose loss is a mean, the result is sum_r b_r g_r / sum_r b_r: the gradient of the mean
    over all samples. A rank with no samples adds nothing.
    """

    def __init__(
        self, module: torch.nn.Module, group: dist.ProcessGroup, *, alarm: Alarm, find_unused_parameters: bool = False
    ) -> None:
        super().__init__(module, group, alarm)
        self._module = module
        self._finds_unused = find_unused_parameters
        self._log = ForwardLog(self)
        self._averaging: Averaging | None = None
        self._buckets: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # where they may have to be restored
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
        if not find_unused_parameters:
            self._rehearse()
        self._left: list[str] = []  # parameters without a gradient at the end of a backward that is to be averaged
        self._everything = [_touch(module)] if find_unused_parameters else []
        self._arm()

    def forward(self, samples: float, *args: Any, **kwargs: Any) -> Any:
        """Runs the module on a batch of `samples` samples."""
        self._require_complete()
        self._forget_abandoned()
        forward = self._log.begin(samples, is_averaged=not self._is_paused)
        # DDP's own forward looks for unused parameters; else it only takes time
        output = self._ddp(*args, **kwargs) if self._finds_unused else self._module(*args, **kwargs)
        self._log.watch(forward, output)
        return output

    def _arm(self) -> None:
        """Lets the next backward, whatever causes it, go through DDP's buckets."""
        self._ddp.reducer.prepare_for_backward(self._everything)

    def _rearm(self) -> None:
        """Arms behind what DDP itself has queued for the end of this backward."""
        torch.autograd.Variable._execution_engine.queue_callback(self._arm)

    def _rehearse(self) -> None:
        """Makes DDP settle its buckets now, in an order that depends on the module alone.

        DDP would lay its buckets out anew after the first real backward, and with them the order in which ranks are
        summed: a resumed run would then differ from one that was not interrupted, in the last bits of one step.
        """
        self._body.rehearsing = True
        self._ddp().backward()
        self._ddp.reducer._rebuild_buckets()  # a collective: later it would wait for ranks that never call forward
        self._body.rehearsing = False
        for parameter in self._body.parameters():
            parameter.grad = None

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
        """Begins to average a bucket of gradients; leaves it as it is in no_sync() and in backwards of others."""
        if self._body.rehearsing:
            return _done(bucket.buffer())
        if bucket.index() == 0:
            self._begin_backward()
        future = _done(bucket.buffer()) if self._averaging is None else self._averaging.add(bucket.buffer())
        if self._before is not None:  # gradients may have to be restored
            self._buckets.append((bucket.parameters(), bucket.gradients()))
        ranks = self._group.size()
        self.sent_bytes += 0 if self._averaging is None else 2 * (ranks - 1) * bucket.buffer().nbytes // ranks
        if bucket.is_last():
            self._end_backward(bucket.buffer().device)
        return future

    def _begin_backward(self) -> None:
        forwards = self._log.members()
        self._averaging, self._buckets = None, []
        if any(forward.is_averaged for forward in forwards):
            self._alarm.begin()
            self._averaging = Averaging(self._group, self._alarm, step=self.step)
            if all(f.samples for f in forwards) and not self._log.may_grow:  # else the last bucket tells its weight
                self._averaging.start(self._weight(forwards))

    def _end_backward(self, device: torch.device) -> None:
        forwards = self._log.members()  # all of them: the last gradient is there
        torch.autograd.Variable._execution_engine.queue_callback(self._rearm)
        if self._is_borrowed(forwards):
            for parameters, gradients in self._buckets:
                self._restore(parameters, gradients)
        self._before, self._buckets, self._left = None, [], []
        if self._averaging is None:
            self._kept_local(forwards)
        else:
            if self.clock is not None:
                self.clock.end()
            self._averaging.start(self._weight(forwards))
            self._averaging.close(device)
            self._latest = self._averaging
            self._was_averaged(self._averaging.samples, uncounted(forwards))
        self._log.complete()

    def begin_task(self) -> None:
        """Runs when a backward reaches a forward: the one before may have left parameters for it, and no others."""
        if self._left:
            given = [p for name, p in zip(self._names, self._trained, strict=True) if name not in self._left]
            if any(map(_is_reached, given)):
                raise self._told(SpecError(self._incomplete("backward()", self._left)))
        super().begin_task()

    def end_task(self) -> None:
        """Runs at the end of a backward that has reached a forward."""
        self._note_gradients()
        missing = self._missing()
        if missing and not any(forward.is_averaged for forward in self._log.members()):
            self._arm()  # in no_sync() a loss may use some parameters only
        else:
            self._left = missing

    def _require_complete(self) -> None:
        """Raises `SpecError` where a backward since the last complete one has left parameters without a gradient."""
        missing = self._missing()
        if not missing:
            return
        reached = self._log.reached_since()
        if not reached or any(forward.is_averaged for forward in reached):
            raise self._told(SpecError(self._incomplete("forward", missing)))
        self._arm()  # in no_sync() a loss may use some parameters only

    def _untouched(self) -> list[torch.Tensor]:
        trained = dict(zip(self._names, self._trained, strict=True))
        missing = self._missing()
        return [trained[name] for name in missing if name in trained] if missing else list(self._trained)

    def _missing(self) -> list[str]:
        """Returns the parameters that the last backward has left without a gradient; none if it was complete."""
        try:
            self._ddp.reducer._check_reducer_finalized()  # private: the only way to ask; also in torch 2.11
        except RuntimeError as error:
            found = re.search(r"for rank \d+: ([\d ]+)", str(error))
            numbers = [int(number) for number in found[1].split()] if found else []
            return [self._names[number] for number in numbers] or ["some"]
        return []


def _average(owner: "ref[NodeGradients]", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = owner()
    if gradients is None:
        raise SpecError("backward was called after the synchronized model was let go. Keep it as long as its losses.")
    return gradients.average(bucket)


def _is_reached(parameter: torch.Tensor) -> bool:
    """Returns whether the running backward gives this parameter a gradient."""
    with torch.enable_grad():
        view = parameter.view_as(parameter).grad_fn
    node = view.next_functions[0][0] if view is not None else None
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))  # private: as torch.autograd.graph
    except RuntimeError:  # in autograd.grad()
        return False


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


def _local_buffers() -> dict[str, Any]:
    """Returns DDP's argument, whatever its name in this version of torch, that keeps buffers from travelling."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
