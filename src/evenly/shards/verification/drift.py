"""Monitors that replicated tensors stay equal on all ranks: different hardware rounds differently."""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from evenly._torch import pytree
from evenly.errors import MismatchError, SpecError
from evenly.shards.optim.optimizers import state_placement
from evenly.shards.parts.local_shards import local_shard_of
from evenly.shards.run.sharded import Sharded, sharded_of

logger = logging.getLogger(__name__)

FLOOR = 1e-3  # of the largest number of a kind: the least scale of a tensor, so that noise around 0 is ignored
CHUNK = 1 << 22  # elements that are hashed at a time
_ODD, _SHIFT = -7046029254386353131, 29  # constants of the factors that positions are multiplied with
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Drift:
    """The drift of one tensor: `size` is the largest difference, relative to the tensor's largest number."""

    name: str
    size: float
    ranks: tuple[int, ...]  # of the shard group, whose values differ from those of most


class DriftMonitor:
    """Compares the replicated parameters and buffers of a cut network over its ranks, every few steps.

    Ranks exchange a fingerprint of eight bytes for each tensor, and its values only where fingerprints differ. All
    ranks call every method together.

    Args:
        sharded: the network.
        every: steps between comparisons.
        limit: the largest drift that passes.
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
        """Counts every step of an optimizer of the network until the handle is removed. `mend` includes its state."""
        self._optimizers.append(optimizer)

        def after(_: Optimizer, __: object, ___: object) -> None:
            self.step()

        return optimizer.register_step_post_hook(after)

    def step(self) -> None:
        """Counts a step, and compares the ranks if a comparison is due."""
        self.steps += 1
        if self.steps % self.every == 0:
            self._act(self.measure())

    def measure(self) -> list[Drift]:
        """Returns the tensors that differ between ranks, the largest drift first."""
        tensors, shard_group = self._tensors(), self._sharded.shard_group
        if shard_group.size == 1 or not tensors or self._sharded._program is None:
            return []
        fingerprints = torch.stack([_fingerprint(tensor) for tensor in tensors.values()])[None]  # [1, tensors]
        rows = tuple(((rank, rank + 1),) for rank in range(shard_group.size))
        table = shard_group.gather(fingerprints, 0, rows, name="drift").wait().T.tolist()  # [tensors][ranks]
        differing = {name: row for name, row in zip(tensors, table, strict=True) if len(set(row)) > 1}
        if not differing:
            return []
        sizes = self._sizes({name: tensors[name] for name in differing})
        drifts = [Drift(name, sizes[name], _minority(row)) for name, row in differing.items()]
        return sorted(drifts, key=lambda drift: -drift.size)

    @torch.no_grad()
    def mend(self) -> None:
        """Copies rank 0's replicated tensors, and their optimizer state, to all ranks of the shard group, in place."""
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
            f"after step {self.steps} {len(large)} replicated tensors differ between ranks: "
            f"{worst.name!r} of ranks {list(worst.ranks)} of the network is {worst.size:.1e} of its size away from the "
            f"others', with a limit of {self.limit:.1e}. Call mend() of the monitor to give all ranks the values of "
            "rank 0; give all ranks the same batches and optimizer settings."
        )
        if self.action == "raise":
            raise MismatchError(text)
        logger.warning(text)

    def _tensors(self, *, floats_only: bool = True) -> dict[str, torch.Tensor]:
        """Returns the replicated parameters, then the replicated buffers."""
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in (*self._sharded.named_parameters(), *self._sharded.named_buffers()):
            local_shard = local_shard_of(tensor)
            is_replicated = local_shard is not None and not local_shard.is_cut and tensor.numel() > 0
            if is_replicated and (tensor.is_floating_point() or not floats_only):
                tensors[name] = tensor.detach()
        return tensors

    def _slots(self) -> Iterator[torch.Tensor]:
        """Yields the state of attached optimizers for replicated parameters."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    for key, entry in optimizer.state.get(parameter, {}).items():
                        for value in pytree.tree_leaves(entry):
                            local_shard = state_placement(optimizer, parameter, key, value)
                            if local_shard is not None and not local_shard.is_cut and value.numel():
                                yield value

    def _sizes(self, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
        """Returns the relative drift of tensors, from one all-reduce of the largest and smallest values."""
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
    """Returns the ranks whose fingerprint is not the most common one; the lower rank decides between equals."""
    (most, _), *_rest = Counter(row).most_common(1)
    return tuple(rank for rank, value in enumerate(row) if value != most)


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a sum of the bits times odd factors: integers, so all devices agree, and any single change shows."""
    bits = tensor.reshape(-1).view(_BITS[tensor.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), CHUNK):
        chunk = bits[start : start + CHUNK].to(torch.int64)
        factor = torch.arange(start, start + len(chunk), device=tensor.device) * _ODD
        total += (chunk * ((factor ^ (factor >> _SHIFT)) | 1)).sum()
    return total
