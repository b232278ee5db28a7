"""Sums, gathers and scattered sums of tensors that ranks hold in unequal parts, with every byte counted."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from evenly._torch.autograd import is_end_of_recomputing
from evenly.comm.collectives import (
    CollectiveWaiter,
    Work,
    all_reduce,
    all_to_all,
    broadcast,
    gather_json,
)
from evenly.comm.failure_monitor import FailureMonitor
from evenly.comm.groups import Group, close_groups
from evenly.comm.indexing.segments import Segments, count_of, local_positions, put, shared, take
from evenly.comm.memory.group import MemoryGroup, PausableClock
from evenly.errors import MismatchError, SpecError


@dataclass
class Traffic:
    """What all ranks of a group have sent: collectives, and bytes as a ring or a direct exchange sends them."""

    messages: int = 0
    sent_bytes: int = 0
    by_name: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, sent_bytes: int) -> None:
        """Counts one collective."""
        self.messages += 1
        self.sent_bytes += sent_bytes
        self.by_name[name] += sent_bytes

    def clear(self) -> None:
        """Resets the counts."""
        self.messages = self.sent_bytes = 0
        self.by_name.clear()


class PendingTensor:
    """A tensor whose collective is pending; `wait` returns it."""

    def __init__(
        self,
        finish: Callable[[], torch.Tensor],
        works: Sequence[Work] = (),
        waiter: CollectiveWaiter | None = None,
    ):
        self._finish = finish
        self._works = works
        self._waiter = waiter

    def wait(self) -> torch.Tensor:
        """Returns the tensor once all ranks have sent their part."""
        if self._waiter is not None and self._works:
            self._waiter.wait(self._works)
        return self._finish()


class ShardGroup:
    """The group of ranks that hold the shards of one network, on any mix of devices."""

    def __init__(self, group: Group, monitor: FailureMonitor, *, timeout_s: float = 600.0) -> None:
        self.group = group
        self.monitor = monitor
        self.rank, self.size = group.rank(), group.size()
        self.traffic = Traffic()
        self.batch: tuple[int, list[float]] = (0, [])  # the number of the pass; samples, mode, trace, and some data
        self.failed: Exception | None = None
        self._waiter = CollectiveWaiter(monitor, label="a layer cut over ranks", timeout_s=timeout_s)
        self._waiter.on_quiet = self._report_batch

    def watch(self, clock: PausableClock | None) -> None:
        """Pauses a clock while this rank waits for others."""
        if isinstance(self.group, MemoryGroup):
            self.group.watch = clock  # of which the rank copies and adds up itself
        else:
            self._waiter.watch = clock

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Reports an error inside to the other ranks, so that they do not wait for this one."""
        try:
            yield
        except Exception as error:
            if not is_end_of_recomputing(error):
                self.failed = error
                self.monitor.report(error)
            raise

    def agree_on_batch(self, ranks: Sequence[int]) -> None:
        """Returns once all `ranks` have reported such a batch in this pass, or raises `MismatchError`.

        Messages of unequal size would end the process. A rank whose batch size changed calls it; the others report
        their batch when they wait for long.
        """
        if self.size == 1:
            return
        self._report_batch()
        number, own_batch = self.batch
        batches = [json.loads(text) for text in self._waiter.read_all([f"batch/{number}/{rank}" for rank in ranks])]
        if any(other[0] != own_batch[0] for other in batches):
            sizes = {rank: int(other[0]) for rank, other in zip(ranks, batches, strict=True)}
            raise MismatchError(
                f"the ranks of one network were given batches of unequal size in pass {number}: {sizes} samples. Give "
                "all ranks the same batches: no DistributedSampler, and one seed for shuffling."
            )
        if any(other[1] != own_batch[1] for other in batches):
            modes = {rank: "train" if other[1] else "eval" for rank, other in zip(ranks, batches, strict=True)}
            raise MismatchError(
                f"the ranks of one network are in different modes in pass {number}: {modes}. Call train() or eval() on "
                "all of them."
            )
        changed = [rank for rank, other in zip(ranks, batches, strict=True) if other[2] != own_batch[2]]
        if changed:
            raise MismatchError(
                f"ranks {changed} of one network have other attributes, submodules or modes of submodules than this "
                f"rank in pass {number}: these were changed on some ranks only. Make such changes on all of them."
            )
        differing = [rank for rank, other in zip(ranks, batches, strict=True) if not _is_same_data(own_batch, other)]
        if differing:
            raise MismatchError(
                f"ranks {differing} of one network were given other data than this rank in pass {number}. Give all "
                "ranks the same batches: no DistributedSampler, and one seed for shuffling."
            )

    def _report_batch(self) -> None:
        number, own_batch = self.batch
        self.monitor.rank_group.store.set(f"batch/{number}/{self.monitor.rank_group.rank}", json.dumps(own_batch))

    def sum(self, x: torch.Tensor, *, name: str = "sum", largest: bool = False) -> PendingTensor:
        """Starts the sum (or maximum) over ranks of a tensor that has one shape everywhere; 16-bit ones in float32.

        As in all that is started here, `x` must not change before `wait`.
        """
        if self.size == 1 or not x.numel():
            return PendingTensor(lambda: x)
        if isinstance(self.group, MemoryGroup):
            total = torch.empty_like(x, memory_format=torch.contiguous_format)
            self.traffic.add(name, 2 * (self.size - 1) * total.nbytes)
            return PendingTensor(lambda: total, [self.group.all_reduce(x, into=total, largest=largest)], self._waiter)
        if x.dtype.itemsize < 4 and not largest:
            return self._short_sum(x, name)
        total = x.detach().clone(memory_format=torch.contiguous_format)
        self.traffic.add(name, 2 * (self.size - 1) * total.nbytes)
        return PendingTensor(lambda: total, [all_reduce(total, self.group, largest=largest)], self._waiter)

    def gather(
        self, part: torch.Tensor, dim: int, segments: Sequence[Segments], *, name: str | None = "gather"
    ) -> PendingTensor:
        """Starts collecting a tensor of which rank r holds the indices `segments[r]` of `dim`; traffic has a `name`."""
        if self.size == 1:
            return PendingTensor(lambda: part)
        counts = [count_of(ranges) for ranges in segments]
        rest = part.shape[:dim] + part.shape[dim + 1 :]
        sizes = [count * rest.numel() for count in counts]
        if not sum(sizes):
            return PendingTensor(lambda: part.new_empty(*part.shape[:dim], sum(counts), *part.shape[dim + 1 :]))
        if name is not None:
            self.traffic.add(name, (self.size - 1) * sum(sizes) * part.element_size())
        if isinstance(self.group, MemoryGroup):
            gathered = part.new_empty(*part.shape[:dim], sum(counts), *part.shape[dim + 1 :])
            return PendingTensor(lambda: gathered, [self.group.gather(part, gathered, dim, segments)], self._waiter)
        sent = part.detach().reshape(-1).repeat(self.size)
        received = sent.new_empty(sum(sizes))
        gives = [sizes[self.rank]] * self.size
        work = all_to_all(received, sent, sizes, gives, self.group, largest=max(sizes))

        def finish() -> torch.Tensor:
            whole = part.new_empty(*part.shape[:dim], sum(counts), *part.shape[dim + 1 :])
            for block, count, ranges in zip(torch.split(received, sizes), counts, segments, strict=True):
                piece = block.view(*part.shape[:dim], count, *part.shape[dim + 1 :])
                put(whole, piece, dim, ranges)
            return whole

        return PendingTensor(finish, [work], self._waiter)

    def redeal(
        self, part: torch.Tensor, dim: int, before: Sequence[Segments], after: Sequence[Segments]
    ) -> PendingTensor:
        """Starts resharding a tensor: rank r has the indices `before[r]` of `dim` and will have `after[r]`.

        Only indices that change their rank are sent.
        """
        own_before, own_after = before[self.rank], after[self.rank]
        if self.size == 1 or tuple(before) == tuple(after):
            return PendingTensor(lambda: part)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent_ranges = {rank: local_positions(own_before, shared(own_before, after[rank])) for rank in others}
        received_ranges = {rank: local_positions(own_after, shared(before[rank], own_after)) for rank in others}
        rest = part.shape[:dim] + part.shape[dim + 1 :]
        counts = [count_of(received_ranges[rank]) if rank in received_ranges else 0 for rank in range(self.size)]
        pieces = [take(part.detach(), dim, sent_ranges.get(rank, ())).reshape(-1) for rank in range(self.size)]
        sent = torch.cat(pieces)
        received = sent.new_empty(sum(counts) * rest.numel())
        sizes = [count * rest.numel() for count in counts]
        largest = max(count_of(shared(a, b)) for a in before for b in after) * rest.numel()
        work = all_to_all(received, sent, sizes, [piece.numel() for piece in pieces], self.group, largest=largest)
        num_kept = sum(count_of(shared(a, b)) for a, b in zip(before, after, strict=True))
        num_moved = sum(map(count_of, after)) - num_kept
        self.traffic.add("units", num_moved * rest.numel() * part.element_size())

        def finish() -> torch.Tensor:
            result = part.new_empty(*part.shape[:dim], count_of(own_after), *part.shape[dim + 1 :])
            kept_ranges = shared(own_before, own_after)
            kept = take(part.detach(), dim, local_positions(own_before, kept_ranges))
            put(result, kept, dim, local_positions(own_after, kept_ranges))
            for rank, block in enumerate(torch.split(received, sizes)):
                piece = block.view(*part.shape[:dim], counts[rank], *part.shape[dim + 1 :])
                put(result, piece, dim, received_ranges.get(rank, ()))
            return result

        return PendingTensor(finish, [work], self._waiter)

    def scatter_sum(
        self, summand: torch.Tensor, dim: int, segments: Sequence[Segments], *, name: str = "scatter_sum"
    ) -> PendingTensor:
        """Starts the sum over ranks, in rank order, of which rank r keeps the indices `segments[r]` of `dim`."""
        if self.size == 1 or not summand.numel():
            return PendingTensor(lambda: take(summand, dim, segments[self.rank]))
        if isinstance(self.group, MemoryGroup):
            own = count_of(segments[self.rank])
            total = summand.new_empty(*summand.shape[:dim], own, *summand.shape[dim + 1 :])
            self.traffic.add(name, (self.size - 1) * summand.nbytes)
            return PendingTensor(lambda: total, [self.group.scatter_sum(summand, total, dim, segments)], self._waiter)
        pieces = [take(summand.detach(), dim, ranges) for ranges in segments]
        sent = torch.cat([piece.reshape(-1) for piece in pieces])
        own_piece = pieces[self.rank]
        received = sent.new_empty(self.size * own_piece.numel())
        sizes = [piece.numel() for piece in pieces]
        takes = [own_piece.numel()] * self.size
        work = all_to_all(received, sent, takes, sizes, self.group, largest=max(sizes))
        self.traffic.add(name, (self.size - 1) * sent.nbytes)

        def finish() -> torch.Tensor:
            rows = received.view(self.size, -1)
            wide = torch.float32 if rows.dtype.itemsize < 4 else rows.dtype
            return rows.sum(0, dtype=wide).to(rows.dtype).view(own_piece.shape)

        return PendingTensor(finish, [work], self._waiter)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Returns x as rank `source` has it, written in place on the others."""
        if not x.is_contiguous():
            raise SpecError("a tensor that is not contiguous was to be broadcast; ranks would read it in other orders.")
        if self.size > 1 and x.numel():
            self._waiter.wait([broadcast(x.view(-1).view(torch.uint8), self.group, source=source)])
        return x

    def broadcast_object(self, value: object, source: int) -> Any:
        """Returns the value of rank `source`; values must be JSON."""
        return gather_json(value if self.rank == source else None, self.group, self._waiter)[source]

    def gather_numbers(self, row: Sequence[float], device: torch.device) -> list[list[float]]:
        """Returns every rank's row, all of one length; it is not counted as traffic."""
        rows = tuple(((rank, rank + 1),) for rank in range(self.size))
        part = torch.tensor([row], dtype=torch.float64, device=device)
        return list(self.gather(part, 0, rows, name=None).wait().tolist())

    def _short_sum(self, x: torch.Tensor, name: str) -> PendingTensor:
        flat, count = x.detach().reshape(-1), x.numel()
        edges = [count * rank // self.size for rank in range(self.size + 1)]
        segments = [((edges[rank], edges[rank + 1]),) for rank in range(self.size)]
        part = self.scatter_sum(flat, 0, segments, name=name).wait()
        whole = self.gather(part, 0, segments, name=name)
        self.traffic.messages -= 1  # the two count as one sum
        return PendingTensor(lambda: whole.wait().view(x.shape))

    def close(self) -> None:
        """Shuts the group down."""
        self.monitor.close()
        close_groups([self.group], failed=self.monitor.has_failed)


def _is_same_data(mine: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two batches have the same numbers, up to rounding."""
    pairs = list(zip(mine[3:], other[3:], strict=False))
    scale = max((abs(a) for a, _ in pairs), default=0.0)
    return all(abs(a - b) <= 1e-3 * scale or a != a for a, b in pairs)
