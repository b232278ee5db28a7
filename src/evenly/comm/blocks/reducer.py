"""Sides that hold the same tensors in different cuts, and the groups in which they average them.

A network that every rank holds whole is the plain case: it travels as one flat vector for each type, each rank is a
replica of its own, and the blocks of a vector are the slices that the ranks of a node own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from evenly.comm import CollectiveWaiter, all_reduce, broadcast, close_groups, to_host
from evenly.comm.blocks.index_blocks import Side, Where, index_blocks
from evenly.comm.blocks.replicas import FLAT, ReplicaRanks, Shape
from evenly.comm.blocks.slice import Slice

Items = Sequence[tuple[str, torch.Tensor]]  # the tensor of whose form it is, or FLAT, and this rank's part
Ranks = tuple[int, ...]
Open = Callable[[str, Sequence[int]], dist.ProcessGroup]
Circle = TypeVar("Circle", Ranks, tuple[Ranks, int])
Blocks = dict[Circle, list[Where]]


@dataclass(frozen=True)
class PackedSlice:
    """What travels together: a vector, and the views of tensors that it was made of."""

    part: Slice
    views: list[torch.Tensor]

    def unpack(self) -> None:
        """Puts the vector back into the tensors."""
        _unpack(self.part.values, self.views)


@dataclass(frozen=True)
class Route:
    """Which blocks of one tensor travel where, each as it lies in this rank's part."""

    sums: Blocks[Ranks] = field(default_factory=dict)  # by owners, one for each side
    casts: Blocks[tuple[Ranks, int]] = field(default_factory=dict)  # by ranks that have it, and the owner


class BlockReducer:
    """Sides that average tensors in global coordinates, as one rank sees it.

    A side is one replica, or all replicas of a node. What has the same owners on all sides travels together, but every
    flat vector by itself. Groups that are there already are given as `groups`, by their ranks; `labels` name the points
    of some circles of owners, else their ranks do.
    """

    def __init__(
        self,
        name: str,
        sides: Sequence[Sequence[ReplicaRanks]],
        shapes: Mapping[str, Shape],
        *,
        rank: int,
        open_group: Open,
        spreads: bool = True,
        groups: Mapping[Ranks, dist.ProcessGroup] | None = None,
        labels: Mapping[Ranks, str] | None = None,
    ) -> None:
        self.sides = len(sides)
        self._sides = sides
        self._rank = rank
        self._spreads = spreads
        self._labels = labels or {}
        self._own = next(place for place, side in enumerate(sides) if any(rank in r.everybody for r in side))
        self._routes = {tensor: self._route(tensor, shape or (1,)) for tensor, shape in shapes.items()}
        self._scalars = {tensor for tensor, shape in shapes.items() if not shape}
        self._vectors: dict[int, Route] = {}  # flat ones, by their length
        circles = {ranks for route in self._routes.values() for ranks in (*route.sums, *(c for c, _ in route.casts))}
        known = groups or {}
        self._opened = {ranks: open_group(f"{name}{list(ranks)}", ranks) for ranks in sorted(circles - known.keys())}
        self.groups = {**known, **self._opened}

    def reduce(
        self,
        items: Items,
        waiter: CollectiveWaiter,
        *,
        weight: float = 1.0,
        kind: Literal["sum", "max", "copy"] = "sum",
    ) -> int:
        """Makes sums over sides of weight x tensor (or maxima) where this rank speaks for its side.

        A copy takes, bit for bit, the tensors of the one side that has weight 1; all others have 0.
        Returns the bytes this rank sends for it.
        """
        pending = []
        sent_bytes = 0
        for owners, views in self._sums(items):
            buffer, group = _joined(views), self.groups[owners]
            if kind != "max":
                scale(buffer, weight)
            sent = buffer.view(torch.uint8) if kind == "copy" else buffer
            travelling = to_host(sent, group)
            pending.append((all_reduce(travelling, group, largest=kind == "max"), travelling, buffer, views))
            sent_bytes += 2 * (self.sides - 1) * sent.nbytes // self.sides
        _finish(pending, waiter)
        return sent_bytes

    def bundles(self, items: Items, *, key: str = "", change: bool = False) -> list[PackedSlice]:
        """Returns what this rank speaks for, one for each circle of owners and each type."""
        made = []
        for owners, views in self._sums(items):
            values = _joined(views)
            kind, label = str(values.dtype).removeprefix("torch."), self._labels.get(owners, "-".join(map(str, owners)))
            made.append(PackedSlice(Slice(values, self.groups[owners], key and f"{key}/{kind}/{label}", change), views))
        return made

    def spread(self, items: Items, waiter: CollectiveWaiter) -> None:
        """Gives what each rank speaks for to all ranks of its side that have the same."""
        pending = []
        for (holders, owner), views in self._casts(items):
            buffer, group = _joined(views), self.groups[holders]
            travelling = to_host(buffer.view(torch.uint8), group, filled=owner == self._rank)
            pending.append((broadcast(travelling, group, source=holders.index(owner)), travelling, buffer, views))
        _finish(pending, waiter)

    def spoken_for(self, total: int) -> list[tuple[int, int]]:
        """Returns the ranges of a flat vector that this rank speaks for."""
        return [(where.start, where.stop) for blocks in self._vector(total).sums.values() for (where,) in blocks]

    def close(self, *, failed: bool = False) -> None:
        """Shuts down the groups it has opened; where a rank has `failed`, works may be under way."""
        close_groups(self._opened.values(), failed=failed)

    def _sums(self, items: Items) -> Iterator[tuple[Ranks, list[torch.Tensor]]]:
        for together in _together(items):
            yield from _by_circle((self._indexed(*item), self._route_of(*item).sums) for item in together)

    def _casts(self, items: Items) -> Iterator[tuple[tuple[Ranks, int], list[torch.Tensor]]]:
        for together in _together(items):
            yield from _by_circle((self._indexed(*item), self._route_of(*item).casts) for item in together)

    def _indexed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor with a dim to index also where it is a scalar; a complex one is a pair of numbers here."""
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
        held = [Side(shape, tensor, replicas) for replicas in self._sides]
        own = held[self._own]
        for block in index_blocks(shape, held):
            owners = tuple(side.owner(block) for side in held)
            holders = own.holders(block)
            if self._rank in owners and len(owners) > 1:
                _add(route.sums, owners, own.where(block, self._rank))
            if self._spreads and self._rank in holders and len(holders) > 1:
                _add(route.casts, (holders, owners[self._own]), own.where(block, self._rank))
        return route


def _add(blocks: Blocks[Circle], circle: Circle, where: Where) -> None:
    """Adds a block; of a vector neighbours become one, so that they need not be copied together."""
    found = blocks.setdefault(circle, [])
    if found and len(where) == 1 and found[-1][0].stop == where[0].start:
        found[-1] = (slice(found[-1][0].start, where[0].stop),)
    else:
        found.append(where)


def _together(items: Items) -> Iterator[Items]:
    """Yields what travels together: all tensors of a type, and each flat vector alone, which is long already."""
    yield from ([item] for item in items if item[0] == FLAT)
    named = [item for item in items if item[0] != FLAT]
    for dtype in sorted({tensor.dtype for _, tensor in named}, key=str):
        yield [(name, tensor) for name, tensor in named if tensor.dtype == dtype]


def _by_circle(
    routed: Iterator[tuple[torch.Tensor, Blocks[Circle]]],
) -> Iterator[tuple[Circle, list[torch.Tensor]]]:
    """Yields circles with this rank's views of the blocks that travel in them.

    Circles come in the order of their first blocks, which all of their ranks see alike.
    """
    found: dict[Circle, list[torch.Tensor]] = {}
    for tensor, blocks in routed:
        for circle, places in blocks.items():
            found.setdefault(circle, []).extend(tensor[where] for where in places)
    yield from found.items()


def scale(buffer: torch.Tensor, weight: float) -> None:
    """Multiplies in place; what has no weight becomes 0, whatever it was."""
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
    pending: Sequence[tuple[dist.Work, torch.Tensor, torch.Tensor, list[torch.Tensor]]], waiter: CollectiveWaiter
) -> None:
    """Waits for works; puts what has travelled back into buffers and these into the views they were made of."""
    waiter.wait([work for work, *_ in pending])
    for _, travelling, buffer, views in pending:
        if travelling.device != buffer.device:
            buffer.view(travelling.dtype).copy_(travelling, non_blocking=True)
        _unpack(buffer, views)


def _unpack(buffer: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    if buffer is views[0]:
        return
    for view, piece in zip(views, torch.split(buffer, [view.numel() for view in views]), strict=True):
        view.copy_(piece.view(view.shape))
