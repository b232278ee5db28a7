"""One backward: buckets of gradients, averaged over a group by samples, and checked for non-finite values."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evenly.comm import (
    CollectiveWaiter,
    FailureMonitor,
    Group,
    MemoryWork,
    Work,
    all_reduce,
    call_when_done,
    first_line,
)
from evenly.errors import PeerError

_NOTHING = torch.empty(0, device="cpu")
MOST_JOINED = 4 * 2**20  # bytes of a last bucket that is copied into one message with the tally


@dataclass
class _Bucket:
    """A bucket of gradients whose all-reduce is pending."""

    future: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    summed: torch.Tensor = _NOTHING  # over ranks, in at least 32 bits
    previous: torch.Tensor | None = None  # its former values, if this rank has no samples


class BucketAveraging:
    """Averages the buckets of one backward: sum_r b_r g_r / sum_r b_r, with b_r samples on rank r.

    The tally sums every rank's samples and tells whether its gradients were finite; the sums of gradients are divided
    by it. It travels behind the last bucket, in the same message if that is small. Collectives start on the thread that
    runs backward, in the same order on every rank; callbacks only compute.
    """

    def __init__(self, group: Group, monitor: FailureMonitor, *, step: int) -> None:
        self.samples, self.step = 0.0, step
        self._group, self._monitor = group, monitor
        self.has_started = False
        self.nbytes = 0  # of all buckets
        self._queued: list[_Bucket] = []  # until the weight is known
        self._last: _Bucket | None = None  # until the tally is known
        self._sent: list[_Bucket] = []
        self._checks: list[torch.Tensor] = []
        self._sums: list[torch.futures.Future[object]] = []
        self._memory_works: list[MemoryWork] = []
        self._lock = threading.Lock()
        self._awaited = 1  # the all-reduce with the tally
        self._tally = _NOTHING  # [members] not zero: gradients not finite; samples; [parameters] not zero: with one
        self._event: torch.cuda.Event | None = None

    def add(self, buffer: torch.Tensor, *, is_last: bool) -> torch.futures.Future[torch.Tensor]:
        """Adds a bucket; the future gets it once it is averaged."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        bucket = _Bucket(future, buffer)
        self.nbytes += buffer.nbytes
        self._monitor.watch_future(future, buffer)
        if is_last:
            self._last = bucket
        else:
            self._queued.append(bucket)
            if self.has_started:
                self._send()
        return future

    def cancel(self) -> None:
        """Returns the buckets unchanged if the backward is not averaged after all."""
        buckets, self._queued = self._queued, []
        for bucket in [*buckets, *([] if self._last is None else [self._last])]:
            self._monitor.complete_future(bucket.future, bucket.buffer)

    def start(self, samples: float) -> None:
        """Sends the buckets added so far, and later ones but the last at once; only the first call counts."""
        if not self.has_started:
            self.has_started, self.samples = True, samples
            self._send()

    def _send(self) -> None:
        buckets, self._queued = self._queued, []
        for bucket in buckets:
            self._look_at(bucket)
            self._send_bucket(bucket)

    def _look_at(self, bucket: _Bucket) -> None:
        """Notes whether a bucket is finite; without samples, clears it."""
        self._sent.append(bucket)
        if self.samples != 0:
            self._checks.append(finiteness_check(bucket.buffer))
        else:
            bucket.previous = finite(bucket.buffer)  # kept if no rank has samples
            bucket.buffer.zero_()  # 0 * NaN would not be 0

    def _send_bucket(self, bucket: _Bucket) -> None:
        buffer = bucket.buffer
        bucket.summed = buffer.float() if buffer.dtype.itemsize < 4 else buffer  # 16 bits cannot hold the products
        with self._lock:
            self._awaited += 1
        self._send_sum(bucket.summed)

    def _send_sum(self, values: torch.Tensor) -> None:
        """Starts the sum of these values over ranks, each weighted by its samples."""
        factor = None if self.samples in (0, 1) else self.samples
        self._start(all_reduce(values, self._group, factor=factor))

    def finish(self, has_gradient: Sequence[bool] = ()) -> None:
        """Sends the last bucket and the tally: samples, finiteness and the parameters with a gradient."""
        last, self._last = self._last, None
        if last is None:
            raise ValueError("the buckets were to be finished, but the last of them was not added")
        self._look_at(last)
        buffer, length = last.buffer, self._group.size() + 1 + len(has_gradient)
        if buffer.nbytes <= MOST_JOINED and not buffer.is_complex():
            dtype = torch.float32 if buffer.dtype.itemsize < 4 else buffer.dtype
            message = torch.empty(buffer.numel() + length, dtype=dtype, device=buffer.device)
            last.summed, self._tally = message[: buffer.numel()], message[buffer.numel() :]
            last.summed.copy_(buffer)
        else:
            message = self._tally = torch.empty(length, dtype=torch.float64, device=buffer.device)
            self._send_bucket(last)
        if buffer.device.type == "cpu":
            self._fill_on_host(has_gradient)
        else:
            self._fill_on_device(has_gradient)
        self._send_sum(message)

    def _fill_on_host(self, has_gradient: Sequence[bool]) -> None:
        """Writes this rank's tally, computed in Python: torch's operations on so few values take longer.

        All of it is multiplied by the samples when it is sent, if there are any.
        """
        values = [0.0] * self._group.size() + [float(self.samples != 0), *map(float, has_gradient)]
        values[self._group.rank()] = float(not all(math.isfinite(check.item()) for check in self._checks))
        self._tally.copy_(torch.tensor(values, dtype=self._tally.dtype, device="cpu"))

    def _fill_on_device(self, has_gradient: Sequence[bool]) -> None:
        """Writes the same on a device, without waiting for it."""
        size = self._group.size()
        self._tally.zero_()
        self._tally[size] = float(self.samples != 0)
        if has_gradient:
            self._tally[size + 1 :] = torch.tensor(has_gradient, dtype=self._tally.dtype)
        if self._checks:
            total = torch.stack([check.double() for check in self._checks]).sum()
            self._tally[self._group.rank()] = (~torch.isfinite(total)).to(self._tally.dtype)

    @property
    def is_immediate(self) -> bool:
        """Whether reading the tally makes no device wait."""
        return not self._tally.is_cuda and self._event is None

    def fetch(self) -> None:
        """Starts the copy of the tally to the host."""
        if self._tally.is_cuda:
            stream = torch.cuda.current_stream(self._tally.device)
            self._tally = self._tally.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def nonfinite_members(self) -> list[int]:
        """Returns the members of the group whose gradients were not finite."""
        if self._event is not None:
            self._event.synchronize()
        counts = self._tally.tolist()[: self._group.size()]
        return [member for member, count in enumerate(counts) if count]

    def unused(self, indices: Sequence[int]) -> list[int]:
        """Returns those of the parameters at `indices` that have no gradient on any rank."""
        if not indices:
            return []
        used = self._tally[self._group.size() + 1 :].tolist()
        return [index for index in indices if not used[index]]

    def release(self) -> None:
        """Frees what only the running backward needs: 32-bit copies and former values of gradients."""
        self._sent = []
        self._sums = []
        self._checks = []

    def complete(self) -> None:
        """Completes what is sent through shared memory, at the end of the backward; other collectives do it alone."""
        works, self._memory_works = self._memory_works, []
        if works:
            timeout_s = self._monitor.rank_group.store.timeout_s
            label = "the averaging of gradients"
            CollectiveWaiter(self._monitor, label=label, step=self.step, timeout_s=timeout_s).wait(works)
            self._divide()

    def _start(self, work: Work) -> None:
        if isinstance(work, MemoryWork):
            self._memory_works.append(work)
            return
        reduced = work.get_future()
        self._sums.append(reduced)
        call_when_done(reduced, self._arrived)

    def _arrived(self, reduced: torch.futures.Future[object]) -> None:
        with self._lock:
            self._awaited -= 1
            complete = self._awaited == 0
        try:
            reduced.value()
            if complete:
                self._divide()
        except RuntimeError as error:
            self._fail(error)

    def _divide(self) -> None:
        for reduced in self._sums:
            reduced.wait()  # already done: this orders the device's streams
        total = self._tally[self._group.size()]
        is_empty = total == 0
        divisor = torch.where(is_empty, 1.0, total)
        for bucket in self._sent:
            average = bucket.summed.div_(divisor if divisor.is_cuda else float(divisor))
            if bucket.previous is not None:
                average = torch.where(is_empty, bucket.previous, average)
            if average is not bucket.buffer:
                bucket.buffer.copy_(average)
            self._monitor.complete_future(bucket.future, bucket.buffer)

    def _fail(self, error: RuntimeError) -> None:
        self._monitor.wait_for_cause()
        self._monitor.fail(
            PeerError(
                f"rank {self._monitor.rank_group.rank} lost the connection to another rank while gradients were "
                f"averaged in step {self.step}: {first_line(error)}. That rank has ended or cannot be reached; look at "
                "its output."
            )
        )


def finiteness_check(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a real number that is finite if all elements are, up to overflow: their sum, in at least 32 bits."""
    parts = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return torch.sum(parts, dtype=torch.float32 if parts.dtype.itemsize < 4 else None)


def finite(buffer: torch.Tensor) -> torch.Tensor:
    """Returns a copy with zeros for non-finite values, which a batch without samples may give."""
    return torch.where(torch.isfinite(buffer), buffer, torch.zeros_like(buffer))
