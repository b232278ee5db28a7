"""The placement of a local parameter in the full one."""

import itertools
from dataclasses import dataclass

import torch

from evenly._torch.dtensor import is_dtensor, local_part
from evenly.comm.indexing.segments import take
from evenly.comm.shard_group import ShardGroup
from evenly.spec.layout import Segments

_MARK = "_evenly_placement"
_marks = itertools.count(1)
_last_mark = 0


@dataclass(frozen=True)
class LocalShard:
    """Rank r of the group holds the indices `segments[r]` of `dim` of a tensor of `shape`; with dim None all of it."""

    name: str
    shape: torch.Size
    shard_group: ShardGroup
    dim: int | None = None
    segments: tuple[Segments, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds a part only."""
        return self.dim is not None

    def part(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's own copy of its part of the full tensor."""
        if self.dim is None:
            return full.detach().clone()
        piece = take(full.detach(), self.dim, self.segments[self.shard_group.rank])
        shared = piece.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        return piece.clone() if shared else piece  # a view would keep the whole tensor alive

    def full(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the full tensor; all ranks of the group call it together."""
        if self.dim is None:
            return part.detach().clone()
        return self.shard_group.gather(part.detach(), self.dim, self.segments, name="state").wait()


def mark(tensor: torch.Tensor, attribute: str, value: object) -> None:
    """Sets an attribute that relates a tensor to a cut network."""
    global _last_mark
    setattr(tensor, attribute, value)
    _last_mark = next(_marks)


def last_mark() -> int:
    """Returns a number that grows whenever a tensor is marked: what was known about tensors may be outdated."""
    return _last_mark


def set_local_shard(tensor: torch.Tensor, local_shard: LocalShard) -> None:
    """Records which part of a full tensor a parameter or buffer is."""
    mark(tensor, _MARK, local_shard)


def retire(tensor: torch.Tensor) -> None:
    """Records that another parameter replaces this one, because its part has another size now."""
    mark(tensor, _MARK, "retired")


def is_retired(tensor: torch.Tensor) -> bool:
    """Returns whether another parameter replaced this one."""
    return getattr(tensor, _MARK, None) == "retired"


def full_shape(tensor: torch.Tensor) -> torch.Size:
    """Returns the shape of the tensor of which a parameter or buffer is a part."""
    placement = local_shard_of(tensor)
    return tensor.shape if placement is None else placement.shape


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a DTensor as a plain tensor with the same placement; other tensors as they are."""
    if not is_dtensor(tensor):
        return tensor
    part = local_part(tensor)
    placement = local_shard_of(tensor)
    if placement is not None and local_shard_of(part) is not placement:
        set_local_shard(part, placement)  # FSDP may have replaced it
    return part


def local_shard_of(tensor: torch.Tensor) -> LocalShard | None:
    """Returns the placement of a parameter of a network that is cut over ranks; None for any other tensor."""
    placement = getattr(tensor, _MARK, None)
    return placement if isinstance(placement, LocalShard) else None
