"""Sides that hold the same tensors in different cuts, and the groups in which they average them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from evenly.comm import Waiter, all_reduce, broadcast, close_groups
from evenly.nodes.boxes import Side, Where, boxes
from evenly.nodes.points import Part
from evenly.nodes.replicas import Replica, Shape

Items = Sequence[tuple[str, torch.Tensor]]  # the tensor of whose form it is, and this rank's part
Open = Callable[[str, Sequence[int]], dist.ProcessGroup]
Parts = dict[str, list[Where]]


@dataclass(frozen=True)
class Bundle:
    """What travels together: a vector, and the views of tensors that it was made of."""

    part: Part
    views: list[torch.Tensor]

    def unpack(self) -> None:
        """Puts the vector back into the tensors."""
        _unpack(self.part.values, self.views)


class Meeting:
    """Sides that average tensors in global coordinates, as one rank sees it.

    A side is one replica, or all replicas of a node. What has the same owners on all sides travels together.
    """

    def __init__(
        self,
        name: str,
        sides: Sequence[Sequence[Replica]],
        shapes: Mapping[str, Shape],
        *,
        rank: int,
        open_group: Open,
        spreads: bool = True,
    ) -> None:
        self.sides = len(sides)
        self._rank, self._spreads = rank, spreads
        self._own = next(place for place, side in enumerate(sides) if any(rank in r.everybody for r in side))
        self._sums: dict[tuple[int, ...], Parts] = {}  # by owners, one for each side
        self._casts: dict[tuple[tuple[int, ...], int], Parts] = {}  # by ranks that have it, and the owner
        for tensor, shape in shapes.items():
            self._route(tensor, shape or (1,), sides)
        circles = {*self._sums, *(holders for holders, _ in self._casts)}
        self._groups = {circle: open_group(f"{name}{list(circle)}", circle) for circle in sorted(circles)}

    def reduce(
        self, items: Items, waiter: Waiter, *, weight: float = 1.0, kind: Literal["sum", "max", "copy"] = "sum"
    ) -> int:
        """Makes sums over sides of weight x tensor (or maxima) where this rank speaks for its side.

        A copy takes, bit for bit, the tensors of the one side that has weight 1; all others have 0.
        Returns the bytes this rank sends for it.
        """
        pending = []
        sent_bytes = 0
        for owners, parts in sorted(self._sums.items()):
            for views in _by_dtype(items, parts):
                buffer = torch.cat([view.reshape(-1) for view in views])
                if kind != "max":
                    scale(buffer, weight)
                sent = buffer.view(torch.uint8) if kind == "copy" else buffer
                pending.append((all_reduce(sent, self._groups[owners], largest=kind == "max"), buffer, views))
                sent_bytes += 2 * (self.sides - 1) * sent.nbytes // self.sides
        waiter.wait([work for work, _, _ in pending])
        for _, buffer, views in pending:
            _unpack(buffer, views)
        return sent_bytes

    def bundles(self, items: Items, *, key: str = "", change: bool = False) -> list[Bundle]:
        """Returns copies of what this rank speaks for, one for each circle of owners and each type."""
        made = []
        for owners, parts in sorted(self._sums.items()):
            for views in _by_dtype(items, parts):
                values = torch.cat([view.reshape(-1) for view in views])
                kind = str(values.dtype).removeprefix("torch.")
                name = key and f"{key}/{kind}/{'-'.join(map(str, owners))}"
                made.append(Bundle(Part(values, self._groups[owners], name, change), views))
        return made

    def spread(self, items: Items, waiter: Waiter) -> None:
        """Gives what each rank speaks for to all ranks of its side that have the same."""
        pending = []
        for (holders, owner), parts in sorted(self._casts.items()):
            for views in _by_dtype(items, parts):
                buffer = torch.cat([view.reshape(-1) for view in views])
                sent = buffer.view(torch.uint8)
                pending.append((broadcast(sent, self._groups[holders], source=holders.index(owner)), buffer, views))
        waiter.wait([work for work, _, _ in pending])
        for _, buffer, views in pending:
            _unpack(buffer, views)

    def close(self, *, failed: bool = False) -> None:
        """Shuts the groups down; where a rank has `failed`, works may be under way."""
        close_groups(self._groups.values(), failed=failed)

    def _route(self, tensor: str, shape: Shape, sides: Sequence[Sequence[Replica]]) -> None:
        if 0 in shape:
            return
        held = [Side(shape, tensor, replicas) for replicas in sides]
        own = held[self._own]
        for box in boxes(shape, held):
            owners = tuple(side.owner(box) for side in held)
            holders = own.holders(box)
            if self._rank in owners and len(owners) > 1:
                self._sums.setdefault(owners, {}).setdefault(tensor, []).append(own.where(box, self._rank))
            if self._spreads and self._rank in holders and len(holders) > 1:
                circle = (holders, owners[self._own])
                self._casts.setdefault(circle, {}).setdefault(tensor, []).append(own.where(box, self._rank))


def _by_dtype(items: Items, parts: Parts) -> Iterator[list[torch.Tensor]]:
    """Yields this rank's views of the parts that travel together, one list for each type."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for name, tensor in items:
        for where in parts.get(name, ()):
            found.setdefault(tensor.dtype, []).append(_dense(tensor)[where])
    yield from (found[dtype] for dtype in sorted(found, key=str))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached if detached.ndim else detached.view(1)


def scale(buffer: torch.Tensor, weight: float) -> None:
    """Multiplies in place; what has no weight becomes 0, whatever it was."""
    if weight == 0:
        buffer.zero_()  # 0 * NaN would not be 0
    elif weight != 1:
        buffer.mul_(weight)


def _unpack(buffer: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    for view, piece in zip(views, torch.split(buffer, [view.numel() for view in views]), strict=True):
        view.copy_(piece.view(view.shape))
