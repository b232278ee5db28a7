"""Reductions between participants (replicas or nodes) that hold the same tensors in different cuts.

The simple case is a network that every rank holds whole: it is sent as one flat vector for each dtype, each rank is a
replica, and the blocks of a vector are the slices that the ranks of a node own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from evenly.comm import CollectiveWaiter, Group, Work, all_reduce, broadcast, close_groups, to_host
from evenly.comm.blocks.index_blocks import ParticipantTensor, Where, index_blocks
from evenly.comm.blocks.replicas import FLAT, ReplicaRanks, Shape
from evenly.comm.blocks.slice import Slice

Items = Sequence[tuple[str, torch.Tensor]]  # the name of the tensor, or FLAT, and this rank's part
Ranks = tuple[int, ...]
Open = Callable[[str, Sequence[int]], Group]
Members = TypeVar("Members", Ranks, tuple[Ranks, int])
Blocks = dict[Members, list[Where]]


@dataclass(frozen=True)
class PackedSlice:
    """A vector that is sent at once, and the views of tensors that it was packed from."""

    part: Slice
    views: list[torch.Tensor]

    def unpack(self) -> None:
        """Writes the vector back into the tensors."""
        _unpack(self.part.values, self.views)


@dataclass(frozen=True)
class Route:
    """Which blocks of one tensor go to which ranks, in the local coordinates of this rank."""

    sums: Blocks[Ranks] = field(default_factory=dict)  # by owners, one for each participant
    broadcasts: Blocks[tuple[Ranks, int]] = field(default_factory=dict)  # by the ranks that hold it, and the owner


class BlockReducer:
    """Reduces tensors between participants in global coordinates, as seen by one rank.

    A participant is one replica, or all replicas of a node. Blocks with the same owners in all participants are sent at
    once, but every flat vector by itself. `groups` are process groups that exist already, by their ranks; `labels` name
    the anchors of some owners, otherwise their ranks do.
    """

    def __init__(
        self,
        name: str,
        participants: Sequence[Sequence[ReplicaRanks]],
        shapes: Mapping[str, Shape],
        *,
        rank: int,
        open_group: Open,
        broadcasts: bool = True,
        groups: Mapping[Ranks, Group] | None = None,
        labels: Mapping[Ranks, str] | None = None,
    ) -> None:
        self.num_participants = len(participants)
        self._participants = participants
        self._rank = rank
        self._has_broadcasts = broadcasts
        self._labels = labels or {}
        self._own_index = next(
            index
            for index, replicas in enumerate(participants)
            if any(rank in replica.all_ranks for replica in replicas)
        )
        self._routes = {tensor: self._route(tensor, shape or (1,)) for tensor, shape in shapes.items()}
        self._scalars = {tensor for tensor, shape in shapes.items() if not shape}
        self._vectors: dict[int, Route] = {}  # flat ones, by their length
        needed = {owners for route in self._routes.values() for owners in route.sums}
        needed |= {holders for route in self._routes.values() for holders, _ in route.broadcasts}
        existing = groups or {}
        self._opened = {ranks: open_group(f"{name}{list(ranks)}", ranks) for ranks in sorted(needed - existing.keys())}
        self.groups = {**existing, **self._opened}

    def reduce(
        self,
        items: Items,
        waiter: CollectiveWaiter,
        *,
        weight: float = 1.0,
        kind: Literal["sum", "max", "copy"] = "sum",
    ) -> int:
        """Computes sums over participants of weight x tensor (or maxima) in the blocks that this rank owns.

        "copy" takes, bit for bit, the tensors of the one participant that has weight 1; all others have 0.
        Returns the bytes this rank sends for it.
        """
        pending = []
        sent_bytes = 0
        for owners, views in self._sums(items):
            buffer, group = _joined(views), self.groups[owners]
            if kind != "max":
                scale(buffer, weight)
            sent = buffer.view(torch.uint8) if kind == "copy" else buffer
            host_buffer = to_host(sent, group)
            pending.append((all_reduce(host_buffer, group, largest=kind == "max"), host_buffer, buffer, views))
            sent_bytes += 2 * (self.num_participants - 1) * sent.nbytes // self.num_participants
        _finish(pending, waiter)
        return sent_bytes

    def pack(self, items: Items, *, key: str = "", change: bool = False) -> list[PackedSlice]:
        """Returns the slices that this rank owns, one for each set of owners and each dtype."""
        packed = []
        for owners, views in self._sums(items):
            values = _joined(views)
            kind, label = str(values.dtype).removeprefix("torch."), self._labels.get(owners, "-".join(map(str, owners)))
            anchor_key = key and f"{key}/{kind}/{label}"
            packed.append(PackedSlice(Slice(values, self.groups[owners], anchor_key, change), views))
        return packed

    def broadcast(self, items: Items, waiter: CollectiveWaiter) -> None:
        """Sends the blocks from their owners to all ranks of the participant that hold them."""
        pending = []
        for (holders, owner), views in self._broadcasts(items):
            buffer, group = _joined(views), self.groups[holders]
            host_buffer = to_host(buffer.view(torch.uint8), group, filled=owner == self._rank)
            pending.append((broadcast(host_buffer, group, source=holders.index(owner)), host_buffer, buffer, views))
        _finish(pending, waiter)

    def owned_ranges(self, total: int) -> list[tuple[int, int]]:
        """Returns the ranges of a flat vector that this rank owns."""
        return [(where.start, where.stop) for blocks in self._vector(total).sums.values() for (where,) in blocks]

    def close(self, *, failed: bool = False) -> None:
        """Shuts down the groups it has opened; where a rank has `failed`, collectives may be pending."""
        close_groups(self._opened.values(), failed=failed)

    def _sums(self, items: Items) -> Iterator[tuple[Ranks, list[torch.Tensor]]]:
        for batch in _batches(items):
            yield from _by_members((self._indexed(*item), self._route_of(*item).sums) for item in batch)

    def _broadcasts(self, items: Items) -> Iterator[tuple[tuple[Ranks, int], list[torch.Tensor]]]:
        for batch in _batches(items):
            yield from _by_members((self._indexed(*item), self._route_of(*item).broadcasts) for item in batch)

    def _indexed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor with a dim to index also if it is a scalar; a complex scalar is a pair of numbers here."""
        return tensor.detach()[None] if name in self._scalars else tensor.detach()

    def _route_of(self, name: str, tensor: torch.Tensor) -> Route:
        return self._vector(tensor.numel()) if name == FLAT else self._routes.get(name, Route())

    def _vector(self, total: int) -> Route:
        if total not in self._vectors:
            self._vectors[total] = self._route(FLAT, (total,))
        return self._vectors[total]

    def _route(self, tensor: str, shape: Shape) -> Route:
        route = Route()
        if 0 in shape:
            return route
        participants = [ParticipantTensor(shape, tensor, replicas) for replicas in self._participants]
        own = participants[self._own_index]
        for block in index_blocks(shape, participants):
            owners = tuple(participant.owner(block) for participant in participants)
            holders = own.holders(block)
            if self._rank in owners and len(owners) > 1:
                _add(route.sums, owners, own.where(block, self._rank))
            if self._has_broadcasts and self._rank in holders and len(holders) > 1:
                _add(route.broadcasts, (holders, owners[self._own_index]), own.where(block, self._rank))
        return route


def _add(blocks: Blocks[Members], members: Members, where: Where) -> None:
    """Adds a block; adjacent ranges of a vector are merged, which saves a copy."""
    members_blocks = blocks.setdefault(members, [])
    if members_blocks and len(where) == 1 and members_blocks[-1][0].stop == where[0].start:
        members_blocks[-1] = (slice(members_blocks[-1][0].start, where[0].stop),)
    else:
        members_blocks.append(where)


def _batches(items: Items) -> Iterator[Items]:
    """Yields what is sent at once: all tensors of a dtype, and each flat vector alone, which is long already."""
    yield from ([item] for item in items if item[0] == FLAT)
    named = [item for item in items if item[0] != FLAT]
    for dtype in sorted({tensor.dtype for _, tensor in named}, key=str):
        yield [(name, tensor) for name, tensor in named if tensor.dtype == dtype]


def _by_members(
    routed: Iterator[tuple[torch.Tensor, Blocks[Members]]],
) -> Iterator[tuple[Members, list[torch.Tensor]]]:
    """Yields member ranks with this rank's views of the blocks that they exchange.

    They come in the order of their first blocks, which is the same on all members.
    """
    views: dict[Members, list[torch.Tensor]] = {}
    for tensor, blocks in routed:
        for members, wheres in blocks.items():
            views.setdefault(members, []).extend(tensor[where] for where in wheres)
    yield from views.items()


def scale(buffer: torch.Tensor, weight: float) -> None:
    """Multiplies in place; with weight 0 everything becomes 0, even NaN."""
    if weight == 0:
        buffer.zero_()  # 0 * NaN would not be 0
    elif weight != 1:
        buffer.mul_(weight)


def _joined(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the views as one vector: a copy, or the only one itself where it is a vector."""
    if len(views) == 1 and views[0].ndim == 1 and views[0].is_contiguous():
        return views[0]
    return torch.cat([view.reshape(-1) for view in views])


def _finish(
    pending: Sequence[tuple[Work, torch.Tensor, torch.Tensor, list[torch.Tensor]]], waiter: CollectiveWaiter
) -> None:
    """Waits for collectives; copies the results back into the buffers and these into their views."""
    waiter.wait([work for work, *_ in pending])
    for _, host_buffer, buffer, views in pending:
        if host_buffer.device != buffer.device:
            buffer.view(host_buffer.dtype).copy_(host_buffer, non_blocking=True)
        _unpack(buffer, views)


def _unpack(buffer: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    if buffer is views[0]:
        return
    for view, piece in zip(views, torch.split(buffer, [view.numel() for view in views]), strict=True):
        view.copy_(piece.view(view.shape))
