"""Collectives of the ranks of one machine, in rounds through slots of shared memory.

Every rank writes what it gives into its slot, posts that it is there, waits for the posts of the others, and reads what
it needs from theirs. A slot is written again when all others have posted that they have read it; there are several, so
that a rank may be some rounds ahead. A collective is begun when it is started, as far as slots are free, and completed
by the thread that waits for it: no thread of its own takes time from a busy core.
"""

import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from evenly.comm.indexing.segments import Segments, count_of, put, sliced, take
from evenly.comm.memory.mapping import HEADER_WORDS, MappedMemory
from evenly.comm.memory.members import Absence, Processes
from evenly.comm.memory.rounds import (
    BroadcastRound,
    GatherRound,
    Round,
    ScatterRound,
    deal_rounds,
    describe,
    is_served,
    sum_rounds,
)
from evenly.comm.memory.slot_access import ARRIVED, LIMIT_S, READ, REDUCED, SlotAccess
from evenly.errors import LockstepError, PeerError, SpecError

Check = Callable[[Absence], None]
Results = Sequence[torch.Tensor]  # that a collective writes

SLICE_S = 0.1  # a wait is interrupted so often, to look for failures
LEAST_TWO_PHASES = 1 << 20  # bytes, with four ranks: shorter ones are summed by every rank, which saves a wait
_CLOSED = 3  # what a rank writes beside the counts of phases: whether it has closed the group
_IS_CLOSED, _IS_UNMAPPED = 1, 2  # unmapped: its device does not use the memory of others any more


class PausableClock(Protocol):
    """A clock that is paused while a rank waits for others."""

    def pause(self) -> None:
        """A wait begins."""

    def resume(self) -> None:
        """A wait is over."""


class _Queued(NamedTuple):
    """A round of a collective, what ranks must have in common in it, and the slot through which it goes."""

    round: Round
    digest: int
    slot: int
    access: SlotAccess
    stream: torch.cuda.Stream | None  # on which the collective was started, and is completed


class MemoryWork:
    """A collective that has been started; `finish` completes it and those that were started before it.

    On a device it is completed on the stream on which it was started; the stream that is current in `finish` waits.
    """

    def __init__(
        self, group: "MemoryGroup", last: int, access: SlotAccess, stream: torch.cuda.Stream | None, results: Results
    ) -> None:
        self.after: Callable[[], None] | None = None  # called once it is complete
        self._group = group
        self._last = last  # the number of its last round
        self._access = access
        self._stream = stream
        self._results = results

    def finish(self, check: Check) -> None:
        """Returns when it is complete; calls `check` now and then, which may raise."""
        self._group.finish(self._last, check)
        current = self._access.current_stream()
        if self._stream is not None and current is not None and current != self._stream:
            current.wait_stream(self._stream)
            for result in self._results:
                result.record_stream(current)
        self._results = ()
        after, self.after = self.after, None
        if after is not None:
            after()


class MemoryGroup:
    """Ranks of one machine that share memory; `plain` is their group for what torch itself sends.

    A tensor that is sent must not change before the collective is complete. Ranks must make the same collectives in the
    same order; where one thread waits in the group, others wait for it.
    """

    def __init__(
        self,
        memory: MappedMemory,
        rank: int,
        processes: Processes,
        *,
        ranks: Sequence[int],
        accesses: Mapping[str, SlotAccess],
    ) -> None:
        """Begins the use of memory that all ranks have mapped.

        Args:
            memory: the memory of the host, with the semaphores and headers.
            rank: the number of this member.
            processes: those of the members.
            ranks: the members, as errors name them.
            accesses: how this rank reaches the slots, by the type of the device of a tensor.
        """
        self.plain: dist.ProcessGroup | None = None
        self.watch: PausableClock | None = None  # paused while this rank waits
        self._processes = processes
        self._ranks = ranks  # of the members, as errors name them
        self.num_started = 0  # rounds
        self.num_finished = 0
        self._rank = rank
        self._shape = memory.shape
        self._semaphores = memory.semaphores
        self._headers = memory.headers
        self._accesses = dict(accesses)
        self._others = [other for other in range(memory.shape.num_ranks) if other != rank]
        self._queue: deque[_Queued] = deque()  # rounds that are not finished
        self._num_queued = 0  # in all
        self._num_collectives = 0
        self._num_read = [0] * memory.shape.num_slots  # ranks that have read a slot since it was written
        self._last = [-1] * memory.shape.num_slots  # the number of the round that was written last
        self._is_broken = False
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread that has the lock
        self._pid = os.getpid()

    def rank(self) -> int:
        """Returns the number of this member, as a process group does."""
        return self._rank

    def size(self) -> int:
        """Returns the number of members, as a process group does."""
        return self._shape.num_ranks

    def place(self, tensor: torch.Tensor) -> str | None:
        """Returns through what memory tensors of this device go: "host" or "device"; None if they cannot be sent."""
        access = self._accesses.get(tensor.device.type)
        return None if access is None else access.place

    def shutdown(self) -> None:
        """Ends the use of the memory on this rank; a second call does nothing."""
        is_idle = not self._is_broken and not self._queue
        self._is_broken = True
        if self._lock.acquire(blocking=False):  # otherwise a thread waits in it, and will see that it is closed
            if self._accesses:
                self._close_accesses(is_idle=is_idle)
            self._headers = memoryview(bytearray(8)).cast("q")
            self._lock.release()
        self._processes.close()
        if self.plain is not None:
            self.plain.shutdown()

    def _close_accesses(self, *, is_idle: bool) -> None:
        """Ends the use of the slots and tells the others."""
        accesses, self._accesses = list(self._accesses.values()), {}
        counts = [self._counts(other) for other in self._others]
        if is_idle and any(access.place != "host" for access in accesses):
            is_idle = self._have_others_read()
        ends = [
            access.close(
                is_idle=is_idle, have_others_closed=lambda: all(row[_CLOSED] == _IS_UNMAPPED for row in counts)
            )
            for access in accesses
        ]
        self._counts(self._rank)[_CLOSED] = _IS_UNMAPPED if all(ends) else _IS_CLOSED

    def _have_others_read(self) -> bool:
        """Returns whether all others have read what this rank has sent, within a few seconds."""
        until = time.monotonic() + LIMIT_S
        for slot, number in enumerate(self._last):
            semaphore = self._shape.semaphore(slot, READ, self._rank)
            while number >= 0 and self._num_read[slot] < len(self._others):
                if self._semaphores.try_take(semaphore):
                    self._num_read[slot] += 1
                elif time.monotonic() > until:
                    return False
                else:
                    time.sleep(0.001)
        return True

    def all_reduce(
        self,
        source: torch.Tensor,
        *,
        into: torch.Tensor | None = None,
        largest: bool = False,
        factor: float | None = None,
    ) -> MemoryWork:
        """Starts the sum (or maximum) of a tensor, in place or `into` another contiguous one of the same shape.

        This rank's values count times `factor`.
        """
        target = source if into is None else into
        if not target.is_contiguous():
            raise SpecError("a tensor that is not contiguous was to be summed; ranks would add other elements.")
        if largest and source.is_complex():
            raise SpecError("the largest of complex numbers was asked for, which have no order. Give real ones.")
        rounds = sum_rounds(
            source.detach().reshape(-1),
            target.detach().view(-1),
            largest=largest,
            factor=factor,
            slot_bytes=self._shape.slot_bytes,
            num_ranks=self.size(),
            least_bytes=4 * LEAST_TWO_PHASES // self.size() if self._access(source).sums_in_slices else None,
        )
        return self._start(rounds, source, [target], digest=f"{source.numel()}")

    def gather(self, part: torch.Tensor, whole: torch.Tensor, dim: int, segments: Sequence[Segments]) -> MemoryWork:
        """Starts collecting a tensor, of which rank r holds the indices `segments[r]` of `dim`, into `whole`."""
        counts = [count_of(ranges) for ranges in segments]
        others = whole.numel() // max(1, sum(counts))
        num_rows = whole.shape[0] if dim else max(counts)
        row_bytes = max(counts) * others * whole.element_size() // max(1, num_rows)
        if row_bytes <= self._shape.slot_bytes:
            step = self._shape.slot_bytes // max(1, row_bytes)
            rounds = _gather_rounds(part.detach(), whole, dim, segments, num_rows, step)
            return self._start(rounds, part, [whole], digest=_digest(whole, dim, segments))
        lengths = [count * others for count in counts]
        blocks = whole.new_empty(sum(lengths))
        work = self.gather(part.detach().reshape(-1), blocks, 0, _consecutive(lengths))

        def put_blocks() -> None:
            for block, count, ranges in zip(torch.split(blocks, lengths), counts, segments, strict=True):
                put(whole, block.view(*whole.shape[:dim], count, *whole.shape[dim + 1 :]), dim, ranges)

        work.after = put_blocks
        return work

    def scatter_sum(
        self, summand: torch.Tensor, target: torch.Tensor, dim: int, segments: Sequence[Segments]
    ) -> MemoryWork:
        """Starts the sum of a tensor, of which this rank keeps `segments[rank]` of `dim`, into contiguous `target`."""
        counts = [count_of(ranges) for ranges in segments]
        others = summand.numel() // max(1, sum(counts))
        num_rows = summand.shape[0] if dim else max(counts)
        row_bytes = (sum(counts) if dim else self.size()) * others * summand.element_size()
        row_bytes //= max(1, num_rows) if dim else 1
        if row_bytes <= self._shape.slot_bytes:
            step = self._shape.slot_bytes // max(1, row_bytes)
            rounds = self._scatter_rounds(summand.detach(), target, dim, segments, num_rows, step)
            return self._start(rounds, summand, [target], digest=_digest(summand, dim, segments))
        blocks = torch.cat([take(summand.detach(), dim, ranges).reshape(-1) for ranges in segments])
        return self.scatter_sum(blocks, target.view(-1), 0, _consecutive([count * others for count in counts]))

    def all_to_all(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], *, largest: int) -> MemoryWork:
        """Starts sending a flat block to each rank; no block of any rank has more than `largest` values."""
        rounds = deal_rounds(sent, received, rank=self._rank, largest=largest, slot_bytes=self._shape.slot_bytes)
        return self._start(rounds, sent[0], received, digest=f"{largest}")

    def broadcast(self, values: torch.Tensor, *, source: int) -> MemoryWork:
        """Starts sending a flat tensor of member `source` to the others, in place."""
        step = self._shape.slot_bytes // values.element_size()
        parts = [values[start : start + step] for start in range(0, values.numel(), step)]
        rounds = (BroadcastRound(part, source, self._rank) for part in parts)
        return self._start(rounds, values, [values], digest=f"{values.numel()} from {source}")

    def finish(self, last: int, check: Check) -> None:
        """Returns when round `last` and all before it are complete."""
        if self.num_finished > last:
            return
        with self._locked():
            while self.num_finished <= last:
                self._require_open()
                self._finish_next(check)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lets one thread at a time in; an error inside breaks the group, since other ranks may be further."""
        if self._owner == threading.get_ident():
            raise SpecError(
                f"rank {self._ranks[self._rank]} was to send values from inside of a wait for other values, as in a "
                "handler of a signal. Set a flag there, and send them in the loop."
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            except BaseException:
                self._is_broken = True
                raise
            finally:
                self._owner = None

    def _scatter_rounds(
        self,
        summand: torch.Tensor,
        target: torch.Tensor,
        dim: int,
        segments: Sequence[Segments],
        num_rows: int,
        step: int,
    ) -> Iterator[Round]:
        """Yields the rounds of a scattered sum, of `step` rows each; see `gather`."""
        for start in range(0, num_rows, step):
            rows, cut = summand, segments
            if dim:
                rows = summand[start : start + step]
            else:
                cut = [sliced(ranges, start, start + step) for ranges in segments]
            yield ScatterRound(rows, target[start : start + step], dim, cut, self._rank)

    def _start(self, rounds: Iterable[Round], values: torch.Tensor, results: Results, *, digest: str) -> MemoryWork:
        """Queues the rounds of a collective, and starts those for which slots are free.

        `digest` is what ranks must have in common beside the size and type of each round. Collectives of one round
        take turns in half of the slots: the fewer, the more of them stay in the caches of processors.
        """
        access = self._access(values)
        with self._locked():
            self._require_open()
            number = zlib.crc32(f"{access.place} {digest}".encode())
            first, stream = self._num_collectives % max(1, self._shape.num_slots // 2), access.current_stream()
            added = [
                _Queued(item, number, (first + index) % self._shape.num_slots, access, stream)
                for index, item in enumerate(rounds)
            ]
            self._queue.extend(added)
            self._num_collectives += bool(added)
            self._num_queued += len(added)
            self._start_ready()
            return MemoryWork(self, self._num_queued - 1, access, stream, results)

    def _access(self, values: torch.Tensor) -> SlotAccess:
        """Returns how the slots are reached for these values."""
        access = self._accesses.get(values.device.type)
        if not is_served(values.dtype) or (access is None and self._accesses):
            raise SpecError(
                f"values of type {values.dtype} on {values.device} were to be sent through memory that the ranks of a "
                f"machine share, but their group was opened for values on {' and '.join(self._accesses)}. Move the "
                "network before it is cut or synchronized, or set EVENLY_SHARED_MEMORY=0."
            )
        self._require_open()
        return self._accesses[values.device.type]

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise SpecError(
                "a process that was forked from a rank was to send values to other ranks. Only the rank itself can."
            )
        if self._is_broken:
            raise PeerError(
                f"rank {self._ranks[self._rank]} was to send values to ranks of this machine after an earlier "
                "collective with them had failed, or after their group was closed. Look at the first error."
            )

    def _start_ready(self) -> None:
        """Starts queued rounds, in their order, for which a slot is free now."""
        while self.num_started < self._num_queued and self._is_free():
            self._start_next()

    def _is_free(self) -> bool:
        """Whether all ranks have read the slot of the next round."""
        slot = self._queue[self.num_started - self.num_finished].slot
        if self._last[slot] < 0:
            return True
        if self._last[slot] >= self.num_finished:
            return False
        semaphore = self._shape.semaphore(slot, READ, self._rank)
        while self._num_read[slot] < len(self._others) and self._semaphores.try_take(semaphore):
            self._num_read[slot] += 1
        return self._num_read[slot] == len(self._others)

    def _start_next(self) -> None:
        number = self.num_started
        item, digest, slot, access, stream = self._queue[number - self.num_finished]
        with access.on(stream):
            access.before_write(slot, is_first=self._last[slot] < 0)
            item.write(access.slots(slot)[self._rank])
            access.before_post(ARRIVED, slot, item)
        header = self._shape.header(slot, self._rank)
        self._headers[header] = number
        self._headers[header + 1] = item.code
        self._headers[header + 2] = item.size
        self._headers[header + 3] = digest
        self._num_read[slot], self._last[slot] = 0, number
        self._post(slot, ARRIVED)
        self.num_started += 1

    def _finish_next(self, check: Check) -> None:
        """Completes the oldest round."""
        number = self.num_finished
        item, digest, slot, access, stream = self._queue[0]
        if self.num_started == number:
            while not self._is_free():
                self._take(slot, READ, check)
                self._num_read[slot] += 1
            self._start_next()
        self._take_all(slot, ARRIVED, check)
        self._require_same([number, item.code, item.size, digest], slot)
        with access.on(stream):
            access.after_take(ARRIVED, slot, item)
            if item.has_two_phases:
                item.reduce(access.slots(slot), self._rank)
                access.before_post(REDUCED, slot, item)
                self._post(slot, REDUCED)
                self._take_all(slot, REDUCED, check)
                access.after_take(REDUCED, slot, item)
            item.read(access.slots(slot))
            access.before_post(READ, slot, item)
        self._post(slot, READ)
        self._queue.popleft()
        self.num_finished += 1
        self._start_ready()
        if access.is_behind():
            self._wait_for_device(access, check)

    def _wait_for_device(self, access: SlotAccess, check: Check) -> None:
        """Returns once the device has done most of what was queued; calls `check` now and then."""
        until = time.monotonic() + SLICE_S
        while access.is_behind():
            if time.monotonic() > until:
                ended = [member for member in self._processes.ended() if not self._counts(member)[_CLOSED]]
                stopped = self._processes.stopped()  # one that has closed the group may end: it has sent everything
                check(Absence((), *([self._ranks[member] for member in members] for members in (ended, stopped))))
                self._require_open()
                until = time.monotonic() + SLICE_S
            time.sleep(5e-5)

    def _post(self, slot: int, phase: int) -> None:
        for other in self._others:
            self._semaphores.post(self._shape.semaphore(slot, phase, other))
        # afterwards: a rank that dies or stops before it has posted to all counts as one that did not come
        self._counts(self._rank)[phase] = 1 + (self.num_started if phase == ARRIVED else self.num_finished)

    def _take_all(self, slot: int, phase: int, check: Check) -> None:
        for _ in self._others:
            self._take(slot, phase, check)

    def _take(self, slot: int, phase: int, check: Check) -> None:
        semaphore = self._shape.semaphore(slot, phase, self._rank)
        if self._semaphores.try_take(semaphore):
            return
        if self.watch is not None:
            self.watch.pause()
        self._wait(semaphore, slot, phase, check)
        if self.watch is not None:
            self.watch.resume()

    def _wait(self, semaphore: int, slot: int, phase: int, check: Check) -> None:
        """Returns once another rank has posted; calls `check` now and then."""
        while not self._semaphores.take(semaphore, limit_s=SLICE_S):
            gone = [*self._processes.ended(), *(other for other in self._others if self._counts(other)[_CLOSED])]
            if gone and self._semaphores.try_take(semaphore):  # a rank may end as soon as it has posted
                return
            late, stopped = self._late(slot, phase), self._processes.stopped()
            gone = [member for member in gone if member in late]
            check(Absence(*([self._ranks[member] for member in members] for members in (late, gone, stopped))))
            self._require_open()

    def _late(self, slot: int, phase: int) -> list[int]:
        """Returns the members that have not come to a phase of the round in this slot, or not left the one before."""
        if phase == READ:
            return [other for other in self._others if self._counts(other)[READ] <= self._last[slot]]
        return [other for other in self._others if self._counts(other)[phase] <= self.num_finished]

    def _counts(self, member: int) -> memoryview:
        """Returns how many rounds a member has come to, reduced and read, for messages only; and whether it is gone."""
        first = self._shape.counts_at + 4 * member
        return self._headers[first : first + 4]

    def _require_same(self, own: list[int], slot: int) -> None:
        """Raises where ranks have come to different collectives; `own` is the header of this rank."""
        for other in self._others:
            header = self._shape.header(slot, other)
            theirs = self._headers[header : header + HEADER_WORDS].tolist()
            if theirs != own:
                case = f"{describe(own[1])} of {own[2]} values and {describe(theirs[1])} of {theirs[2]}"
                if own[:3] == theirs[:3]:
                    case = f"{describe(own[1])} whose sizes or parts differ"
                raise LockstepError(
                    f"ranks {self._ranks[self._rank]} and {self._ranks[other]} came to different collectives: {case}. "
                    "Every rank must send the same tensors in the same order."
                )


def _digest(tensor: torch.Tensor, dim: int, segments: Sequence[Segments]) -> str:
    """Returns what ranks must have in common to gather or scatter a tensor."""
    parts = ";".join(",".join(f"{start}-{stop}" for start, stop in ranges) for ranges in segments)
    return f"{tuple(tensor.shape)} {dim} {parts}"


def _gather_rounds(
    part: torch.Tensor,
    whole: torch.Tensor,
    dim: int,
    segments: Sequence[Segments],
    num_rows: int,
    step: int,
) -> Iterator[Round]:
    """Yields the rounds of a gather, of `step` rows of each rank; dim 0 has rows of the parts, others of the whole."""
    for start in range(0, num_rows, step):
        rows = part[start : start + step]
        if dim:
            yield GatherRound(rows, whole[start : start + step], dim, segments)
        else:
            yield GatherRound(rows, whole, 0, [sliced(ranges, start, start + step) for ranges in segments])


def _consecutive(lengths: Sequence[int]) -> list[Segments]:
    """Returns the ranges of blocks of these lengths, one after another."""
    return [((end - length, end),) for length, end in zip(lengths, accumulate(lengths), strict=True)]
