"""Watches that what every rank holds whole stays the same on all of them: unlike hardware rounds unlike."""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from evenly._torch import pytree
from evenly.errors import MismatchError, SpecError
from evenly.shards.optim.optimizers import state_placement
from evenly.shards.parts.local_shards import local_shard_of
from evenly.shards.run.sharded import Sharded, sharded_of

logger = logging.getLogger(__name__)

FLOOR = 1e-3  # of the largest number of a kind: smaller tensors are measured by that, lest noise around 0 counts
CHUNK = 1 << 22  # elements that are read at a time
_ODD, _SHIFT = -7046029254386353131, 29  # of the numbers that places are multiplied by
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Drift:
    """How far one tensor is apart: `size` is the largest difference, compared with the tensor's largest number."""

    name: str
    size: float
    ranks: tuple[int, ...]  # of the wire, that hold something else than most


class DriftMonitor:
    """Compares the parameters and buffers that are not cut over the ranks of a wire, every few steps.

    A fingerprint of the bits of each tensor travels, eight bytes each; the values follow only where it differs. All
    ranks call every method together.

    Args:
        sharded: the network.
        every: steps between comparisons.
        limit: the largest drift that is let pass.
        action: whether a larger one raises `MismatchError` or is logged as a warning.
    """

    def __init__(
        self, sharded: Sharded, *, every: int = 100, limit: float = 1e-6, action: Literal["raise", "log"] = "raise"
    ) -> None:
        if every < 1 or not limit >= 0 or action not in ("raise", "log"):
            raise SpecError(
                f"a DriftMonitor was asked for with every={every}, limit={limit}, action={action!r}. Give a whole "
                "number of steps of at least 1, a limit of at least 0, and 'raise' or 'log'."
            )
        self.every = every
        self.limit = limit
        self.action = action
        self.steps = 0
        self._sharded = sharded_of(sharded)
        self._optimizers: list[Optimizer] = []

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Counts every step of an optimizer of the network; the handle ends it. `mend` mends its state too."""
        self._optimizers.append(optimizer)

        def after(_: Optimizer, __: Any, ___: Any) -> None:
            self.step()

        return optimizer.register_step_post_hook(after)

    def step(self) -> None:
        """Counts a step, and compares where it is time to."""
        self.steps += 1
        if self.steps % self.every == 0:
            self._act(self.measure())

    def measure(self) -> list[Drift]:
        """Returns the tensors that are not the same on all ranks, the one that is furthest apart first."""
        tensors, shard_group = self._tensors(), self._sharded.shard_group
        if shard_group.size == 1 or not tensors or self._sharded._program is None:
            return []
        prints = torch.stack([_fingerprint(tensor) for tensor in tensors.values()])[None]  # [1, tensors]
        rows = tuple(((rank, rank + 1),) for rank in range(shard_group.size))
        table = shard_group.gather(prints, 0, rows, name="drift").wait().T.tolist()  # [tensors][ranks]
        apart = {name: row for name, row in zip(tensors, table, strict=True) if len(set(row)) > 1}
        if not apart:
            return []
        sizes = self._sizes({name: tensors[name] for name in apart})
        found = [Drift(name, sizes[name], _minority(row)) for name, row in apart.items()]
        return sorted(found, key=lambda drift: -drift.size)

    @torch.no_grad()
    def mend(self) -> None:
        """Gives all ranks what rank 0 of the wire holds, in place: tensors that are not cut, and their state."""
        shard_group = self._sharded.shard_group
        if shard_group.size == 1 or self._sharded._program is None:
            return
        tensors = [*self._tensors(floats_only=False).values(), *self._slots()]
        if not tensors:
            return
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8).to(tensors[0].device) for tensor in tensors])
        pieces = torch.split(shard_group.broadcast(flat, 0), [tensor.nbytes for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            if shard_group.rank != 0:
                tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))

    def _act(self, drifts: list[Drift]) -> None:
        large = [drift for drift in drifts if not drift.size <= self.limit]
        if not large:
            return
        worst = large[0]
        text = (
            f"after step {self.steps} {len(large)} tensors that all ranks hold whole are not the same on them: "
            f"{worst.name!r} of ranks {list(worst.ranks)} of the wire is {worst.size:.1e} of its size away from the "
            f"others', with a limit of {self.limit:.1e}. Call mend() of the monitor to give all ranks the values of "
            "rank 0; give all ranks the same batches, and the optimizer's settings."
        )
        if self.action == "raise":
            raise MismatchError(text)
        logger.warning(text)

    def _tensors(self, *, floats_only: bool = True) -> dict[str, torch.Tensor]:
        """Returns the parameters, then the buffers, that all ranks hold whole."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in (*self._sharded.named_parameters(), *self._sharded.named_buffers()):
            placement = local_shard_of(tensor)
            whole = placement is not None and not placement.is_cut and tensor.numel() > 0
            if whole and (tensor.is_floating_point() or not floats_only):
                found[name] = tensor.detach()
        return found

    def _slots(self) -> Iterator[torch.Tensor]:
        """Yields what attached optimizers remember of whole parameters."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    for key, held in optimizer.state.get(parameter, {}).items():
                        for value in pytree.tree_leaves(held):
                            placement = state_placement(optimizer, parameter, key, value)
                            if placement is not None and not placement.is_cut and value.numel():
                                yield value

    def _sizes(self, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
        """Returns how far tensors are apart, in one message: the largest and the smallest of every number."""
        wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors.values()) else torch.float32
        buffers = dict(self._sharded.named_buffers())
        flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in tensors.values()])
        flat = torch.where(flat.isnan(), torch.inf, flat)  # a maximum over ranks may lose a NaN
        peaks = [0.0, 0.0]  # of all parameters, of all buffers
        for name, tensor in self._tensors().items():
            peaks[name in buffers] = max(peaks[name in buffers], _peak(tensor))
        flat = torch.cat([flat, flat.new_tensor(peaks)])
        top, low = self._sharded.shard_group.sum(torch.stack([flat, -flat]), name="drift", largest=True).wait()
        spread = torch.where(top == -low, 0.0, top + low)
        floors = (FLOOR * top[-2:]).tolist()
        counts = [tensor.numel() for tensor in tensors.values()]
        sizes = torch.maximum(top.abs(), low.abs())
        rows = zip(tensors, torch.split(spread[:-2], counts), torch.split(sizes[:-2], counts), strict=True)
        return {
            name: _ratio(difference.max().item(), max(_peak(x), floors[name in buffers]))
            for name, difference, x in rows
        }


def _ratio(difference: float, size: float) -> float:
    return difference / size if size > 0 else math.copysign(math.inf, difference) if difference else 0.0


def _peak(x: torch.Tensor) -> float:
    """Returns the largest finite number of a tensor, without its sign."""
    finite = torch.where(x.isfinite(), x, 0.0)
    return finite.abs().max().item()


def _minority(row: list[int]) -> tuple[int, ...]:
    """Returns the ranks whose fingerprint is not the most common one; of two as common, that of the lower rank."""
    (most, _), *_rest = Counter(row).most_common(1)
    return tuple(rank for rank, value in enumerate(row) if value != most)


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a sum of the bits times odd numbers: whole numbers, so all devices agree, and one change always shows."""
    bits = tensor.reshape(-1).view(_BITS[tensor.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), CHUNK):
        chunk = bits[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start, start + len(chunk), device=tensor.device) * _ODD
        total += (chunk * ((place ^ (place >> _SHIFT)) | 1)).sum()
    return total
