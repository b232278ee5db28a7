"""Collectives with waits that name missing ranks, and JSON values between ranks."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from evenly.comm.callbacks import call_when_done
from evenly.comm.failure_monitor import FailureMonitor
from evenly.comm.groups import Group
from evenly.comm.heartbeats import AwakeClock
from evenly.comm.memory.group import MemoryGroup, MemoryWork, PausableClock
from evenly.comm.memory.members import Absence
from evenly.comm.store_gatherer import StoreGatherer
from evenly.errors import LockstepError, PeerError

T = TypeVar("T")

Work = dist.Work | MemoryWork

logger = logging.getLogger(__name__)

_NOTICED_S = 0.5  # a rank that is stopped for longer is named in a warning
SHORT_WAIT_S = 2.0  # a rank that waits longer for others reports it


class CollectiveWaiter:
    """Waits for collectives, and checks the failure monitor meanwhile; `label` says in errors what it waits for."""

    def __init__(
        self, monitor: FailureMonitor, *, label: str, step: int = 0, timeout_s: float = 600.0, reports: bool = True
    ) -> None:
        self.monitor = monitor
        self.label = label
        self.step = step
        self.timeout_s = timeout_s
        self._reports = reports  # whether long waits are reported to the other ranks
        self.on_quiet: Callable[[], None] | None = None  # called once in a wait that is not short
        self.watch: PausableClock | None = None

    def wait(self, works: Iterable[Work], *, waits_for_ranks: bool = False) -> None:
        """Returns when all `works` are done; raises `PeerError` for a rank that failed, left or did not come.

        `waits_for_ranks`: a small message that mainly waits for other ranks; a rank that waits long reports it to them.
        """
        if self.watch is not None:
            self.watch.pause()
        self._wait(works, waits_for_ranks=waits_for_ranks)
        if self.watch is not None:
            self.watch.resume()

    def _wait(self, works: Iterable[Work], *, waits_for_ranks: bool) -> None:
        check = _WaitCheck(self, waits_for_ranks=waits_for_ranks)
        for work in works:
            if isinstance(work, MemoryWork):
                work.finish(check)
                continue
            done = threading.Lock()  # as an event that is set once; `threading.Event` takes longer to make
            done.acquire()
            call_when_done(work.get_future(), partial(_release, done))
            while not done.acquire(timeout=0.1):
                check()
            try:
                work.wait()
            except RuntimeError as error:
                self.monitor.wait_for_cause(f"at {self.label} after step {self.step}")
                self.monitor.check()
                raise self._connection_error(error) from error

    def wait_for(self, done: threading.Event) -> None:
        """Returns when a background thread of this rank is `done`, with the same checks as `wait`."""
        clock = AwakeClock()
        while not done.wait(0.1):
            self.check_wait(clock.read(), waits_for_ranks=True)

    def barrier(self) -> None:
        """Returns when every rank of the group waits with this label; uses the store only."""
        keys = [f"barrier/{self.label}/{rank}" for rank in range(self.monitor.rank_group.size)]
        self.monitor.announce(keys[self.monitor.rank_group.rank])
        self.monitor.set_identities(self.read_all(keys))
        self.monitor.poll()  # the others may have failed before this rank arrived

    def read_all(self, keys: list[str]) -> list[bytes]:
        """Returns the values of these keys in the store, one of each rank, once all exist."""
        store = self.monitor.rank_group.store
        clock, pause_s = AwakeClock(), 0.002
        while not store.check(keys):
            self.monitor.check()
            waited_s = clock.read()
            if waited_s > self.timeout_s:
                error = self._timeout_error(waited_s, [rank for rank, key in enumerate(keys) if not store.check([key])])
                self.monitor.report(error)
                raise error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        return store.get_all(keys)

    def gather_by_store(self, value: str, ranks: Sequence[int], *, why: str, after: str = "") -> list[str]:
        """Returns the `value` of each of `ranks`, once all wait with this label; uses the store only.

        For what only some ranks may have come to: a rank that begins a backward instead fails, and says `why` others
        wait. All of `ranks` average gradients with each other. `after` is the label of the call before, whose value is
        removed: all ranks have read it.
        """
        store, rank = self.monitor.rank_group.store, self.monitor.rank_group.rank
        keys = {other: f"values/{self.label}/{other}" for other in ranks}
        store.set(keys[rank], value)
        clock, pause_s = AwakeClock(), 0.002
        while not store.check(list(keys.values())):
            self.monitor.check()
            self.monitor.require_store()
            self.monitor.require_coming(self.label)
            waited_s = clock.read()
            if waited_s > min(SHORT_WAIT_S, self.timeout_s / 4):
                self.monitor.waiting(self.label, self.step, why=why)
            if waited_s > self.timeout_s:
                error = self._timeout_error(waited_s, [other for other, key in keys.items() if not store.check([key])])
                self.monitor.report(error)
                raise error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        self.monitor.record_passed(self.label)
        values = [content.decode() for content in store.get_all(list(keys.values()))]
        if after:
            store.delete(f"values/{after}/{rank}")
        return values

    def check_wait(self, waited_s: float, *, waits_for_ranks: bool, late: Sequence[int] = ()) -> None:
        """Raises if a wait of `waited_s` is to end; tells the others about a long one.

        `late` are the ranks that have not come, where that is known; otherwise they are asked.
        """
        self.monitor.check()
        if not self._reports and self.monitor.has_failed:  # the others may have failed before they came here
            raise PeerError(
                f"rank {self.monitor.rank_group.rank} has failed and waits no longer at {self.label}. Look at its own "
                "error."
            )
        self.monitor.require_store()
        if waits_for_ranks and self._reports and waited_s > min(SHORT_WAIT_S, self.timeout_s / 4):
            self.monitor.waiting(self.label, self.step)
        if waited_s > self.timeout_s:
            absent_ranks = self.monitor.absent(self.label) if waits_for_ranks and not late else list(late)
            self.monitor.check()  # the query may have found that the store is gone
            error = self._timeout_error(waited_s, absent_ranks)
            self.monitor.report(error)
            raise error

    def raise_gone(self, ranks: Sequence[int]) -> None:
        """Raises an error for ranks of this machine that have ended or closed the group, or what they reported."""
        for _ in range(2):  # a rank that fails reports it before it ends
            self.monitor.poll()
            time.sleep(0.05)
        error = PeerError(
            f"rank {self.monitor.rank_group.rank} waited at {self.label} after step {self.step}, but "
            f"{self.monitor.who(ranks)} {'have' if len(ranks) > 1 else 'has'} ended, or closed what it waits with. "
            "Look at the output there."
        )
        self.monitor.report(error)
        raise error

    def _timeout_error(self, waited_s: float, absent_ranks: list[int]) -> PeerError:
        cause = "all ranks arrived but the transfer did not end."
        if absent_ranks:
            cause = f"ranks {absent_ranks} did not arrive ({self.monitor.who(absent_ranks)})."
        if (missing := self.monitor.missing()) is not None:
            cause = f"{cause if absent_ranks else 'the others did not answer.'} {missing}"
        return PeerError(
            f"rank {self.monitor.rank_group.rank} waited {waited_s:.0f} s at {self.label} after step {self.step}: "
            f"{cause} Look at those ranks' output; for a slow link give a larger timeout_s."
        )

    def _connection_error(self, error: RuntimeError) -> PeerError:
        return PeerError(
            f"at {self.label} after step {self.step} the connection of rank {self.monitor.rank_group.rank} to another "
            f"rank broke: {first_line(error)}. A rank has ended or cannot be reached; look at the other ranks' output."
        )


class _WaitCheck:
    """What is done ten times a second in one wait."""

    def __init__(self, waiter: CollectiveWaiter, *, waits_for_ranks: bool) -> None:
        self._waiter = waiter
        self._waits_for_ranks = waits_for_ranks
        self._clock: AwakeClock | None = None  # only long waits need one
        self._on_quiet = waiter.on_quiet
        self._has_warned = False  # of ranks that are stopped

    def __call__(self, absence: Absence | None = None) -> None:
        """Raises if the wait is to end, as it is if ranks that it waits for have ended."""
        self._clock = self._clock or AwakeClock()
        waited_s = self._clock.read()
        is_stopped = absence is not None and absence.stopped  # then others have nothing to tell
        if self._on_quiet is not None and waited_s > 1.0 and not is_stopped:
            on_quiet, self._on_quiet = self._on_quiet, None
            on_quiet()
        late = () if absence is None else absence.late or absence.stopped
        self._waiter.check_wait(waited_s, waits_for_ranks=self._waits_for_ranks, late=late)
        if absence is not None and absence.gone:
            self._waiter.raise_gone(absence.gone)
        if absence is not None and absence.stopped and waited_s > _NOTICED_S and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "rank %d waits at %s for %s, which is stopped and may be continued (kill -CONT)",
                self._waiter.monitor.rank_group.rank,
                self._waiter.label,
                self._waiter.monitor.who(absence.stopped),
            )


def _release(lock: threading.Lock, _: object) -> None:
    lock.release()


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def all_reduce(tensor: torch.Tensor, group: Group, *, largest: bool = False, factor: float | None = None) -> Work:
    """Starts the sum (or maximum) of `tensor` over the group, in place; this member's counts times `factor`."""
    if isinstance(group, MemoryGroup):
        return group.all_reduce(tensor, largest=largest, factor=factor)
    if factor is not None:
        tensor.mul_(factor)
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    return _work(dist.all_reduce(tensor, op=operation, group=group, async_op=True))


def broadcast(tensor: torch.Tensor, group: Group, *, source: int) -> Work:
    """Starts sending `tensor` from the group's member number `source` to the others, in place."""
    if isinstance(group, MemoryGroup):
        return group.broadcast(tensor.detach().view(-1), source=source)
    return _work(dist.broadcast(tensor, group=group, group_src=source, async_op=True))


def all_gather(tensor: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """Starts collecting the members' tensors, all of one shape; the result is [members, ...] once the work is done."""
    rows = tensor.new_empty(group.size(), *tensor.shape)
    if isinstance(group, MemoryGroup):
        return rows, group.gather(tensor[None], rows, 0, [((row, row + 1),) for row in range(group.size())])
    return rows, _work(dist.all_gather(list(rows.unbind()), tensor, group=group, async_op=True))


def gather_rows(
    tensor: torch.Tensor, group: Group, waiter: CollectiveWaiter, *, waits_for_ranks: bool = False
) -> torch.Tensor:
    """Returns the members' tensors, all of one shape: [members, ...]."""
    if group.size() == 1:
        return tensor[None]
    rows, work = all_gather(tensor, group)
    waiter.wait([work], waits_for_ranks=waits_for_ranks)
    return rows


def all_to_all(
    received: torch.Tensor, sent: torch.Tensor, takes: list[int], gives: list[int], group: Group, *, largest: int
) -> Work:
    """Starts sending `gives[r]` elements of a flat tensor to member r and receiving `takes[r]` from it.

    No member sends another one more than `largest` elements.
    """
    if isinstance(group, MemoryGroup):
        return group.all_to_all(torch.split(received, takes), torch.split(sent, gives), largest=largest)
    return _work(dist.all_to_all_single(received, sent, takes, gives, group=group, async_op=True))


def gather_json(value: T, group: Group, waiter: CollectiveWaiter) -> list[T]:
    """Returns every member's `value`, in the members' order; values must be JSON, and tuples become lists."""
    return [json.loads(content) for content in gather_bytes(json.dumps(value).encode(), group, waiter)]


def gather_bytes(content: bytes, group: Group, waiter: CollectiveWaiter) -> list[bytes]:
    """Returns every member's `content`, in the members' order; it may have any length."""
    sizes, work = all_gather(torch.tensor([len(content)]), group)
    waiter.wait([work], waits_for_ranks=True)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    if content:
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    rows, work = all_gather(padded, group)
    waiter.wait([work])
    return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes[:, 0], strict=True)]


class ObjectGatherer:
    """Gathers values of all ranks of a group, and checks that all ranks make the same calls."""

    def __init__(self, monitor: FailureMonitor, group: Group, *, timeout_s: float) -> None:
        self._monitor = monitor
        self._group = group
        self._timeout_s = timeout_s
        self._number = 0

    def by_store(self) -> StoreGatherer:
        """Returns what gathers values of the same ranks through their store, for a background thread."""
        return StoreGatherer(self._monitor, timeout_s=self._timeout_s)

    def gather(self, value: T, what: str, *, where: str = "") -> list[T]:
        """Returns every rank's `value`; `what` names the call in errors, and `where` its files.

        Raises:
            LockstepError: on every rank, if ranks made different calls.
        """
        self._number += 1
        waiter = CollectiveWaiter(
            self._monitor, label=f"{what}{where} (call {self._number})", timeout_s=self._timeout_s
        )
        rows = gather_json((what, value), self._group, waiter)
        self._monitor.record_passed(waiter.label)
        if any(call != what for call, _ in rows):
            calls = "; ".join(f"rank {rank}: {call}" for rank, (call, _) in enumerate(rows))
            raise LockstepError(
                f"the ranks of a session have come to different calls ({calls}). Every rank must make the same calls "
                "of the session in the same order: move the call out of what only some ranks run."
            )
        return [rank_value for _, rank_value in rows]

    def gather_bytes(self, content: bytes, what: str) -> list[bytes]:
        """Returns every rank's `content`; all ranks have made the same `gather` before."""
        self._number += 1
        waiter = CollectiveWaiter(self._monitor, label=f"{what} (call {self._number})", timeout_s=self._timeout_s)
        contents = gather_bytes(content, self._group, waiter)
        self._monitor.record_passed(waiter.label)
        return contents


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise PeerError(
            "a collective was started by a rank that is not in the group. Every rank must use its own groups."
        )
    return work
