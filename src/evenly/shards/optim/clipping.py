"""Sums over the ranks of a cut network, and clips gradients by their total norm."""

from collections.abc import Callable, Iterable
from functools import reduce

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from evenly._torch.clipping import widen_clipping as widen_clipping_of_torch
from evenly.comm import PendingTensor, ShardGroup
from evenly.errors import NonFiniteError, SpecError
from evenly.shards.parts.guard import cut_tensors_of, guard, trial_mode, unguard
from evenly.shards.parts.local_shards import LocalShard, is_retired, local_shard_of
from evenly.shards.parts.part_tensors import is_part, part_of

_FULL = "_evenly_is_full"  # an attribute of norms of full gradients


class RankSums:
    """Sums tensors over ranks, with one all-reduce per shard group; all ranks add the same shapes in the same order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._summands: list[torch.Tensor] = []
        self._shard_groups: list[ShardGroup | None] = []

    def add(self, summand: torch.Tensor, shard_group: ShardGroup | None) -> int:
        """Adds this rank's summand and returns the index of its sum; without a shard group the summand is the sum."""
        self._summands.append(summand)
        self._shard_groups.append(shard_group)
        return len(self._shard_groups) - 1

    def totals(self) -> list[torch.Tensor]:
        """Returns all sums, by index; all ranks of the shard groups call it together."""
        totals = list(self._summands)
        sent: list[tuple[list[int], PendingTensor]] = []
        for shard_group in dict.fromkeys(shard_group for shard_group in self._shard_groups if shard_group is not None):
            indices = [index for index, other in enumerate(self._shard_groups) if other is shard_group]
            device = totals[indices[0]].device
            flat = torch.cat([totals[index].reshape(-1).to(device) for index in indices])
            sent.append((indices, shard_group.sum(flat, name=self._name)))
        for indices, pending in sent:
            pieces = torch.split(pending.wait(), [totals[index].numel() for index in indices])
            for index, piece in zip(indices, pieces, strict=True):
                totals[index] = piece.view(totals[index].shape).to(totals[index])
        return totals


def squared_norm(x: torch.Tensor, *, dim: int | None = None) -> torch.Tensor:
    """Returns the sum of squares of `x`, or those along `dim`, in float32 at least; 0 if it is empty."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=dim is not None, dtype=_wide(x))
    return norm.square_()


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Returns the norm of all gradients of the full network, and scales them so that it is at most `max_norm`.

    It equals `torch.nn.utils.clip_grad_norm_` on one device. One all-reduce per shard group sums the cut parameters;
    replicated ones and those without a local shard count once. All ranks call it together, with the same
    parameters in the same order.

    Args:
        parameters: local parameters, of any number of shard groups; those without a gradient are ignored.
        max_norm: gradients of a larger norm are scaled.
        norm_type: p of the p-norm, above 0; `math.inf` for the largest entry.
        error_if_nonfinite: whether a NaN or infinite norm raises `NonFiniteError` before gradients are scaled.
    """
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(is_retired(parameter) for parameter in tensors):
        raise SpecError(
            "clip_grad_norm_ was given parameters that resharding has replaced. Get the parameters from the network at "
            "every step: clip_grad_norm_(model.parameters(), ...)."
        )
    if trial_mode.is_on:  # exact on parts, so there is nothing to try
        return torch.ones(())
    grads = [(parameter.grad, local_shard_of(parameter)) for parameter in tensors if parameter.grad is not None]
    total = _total_norm(grads, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise NonFiniteError(
            f"clip_grad_norm_ was called with max_norm={max_norm}, but the gradients' norm of order {norm_type} is "
            f"{total.item()}. Find the cause, or pass error_if_nonfinite=False to scale by it anyway."
        )
    guarded = [parameter for parameter in tensors if is_part(parameter)]
    unguard(tensors)
    clip_grads_with_norm_(tensors, max_norm, total)
    guard(cut_tensors_of(guarded))
    return total


def widen_clipping() -> Callable[[], None]:
    """Makes torch's clipping by norm use the norm of full gradients; other gradients are clipped as before.

    Returns a function that undoes this. If this version of torch cannot be patched, clipping raises an error.
    """
    return widen_clipping_of_torch(total_norm=_widened_norm, clip=_widened_clip)


def _widened_norm(norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns torch's `get_total_norm`, extended to the norm of full gradients if it is called with parts."""

    def get_total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        guarded = [tensor for tensor in grads if is_part(tensor)]
        if not guarded or any(part_of(tensor) is None for tensor in guarded):  # these raise an error
            return norm(grads, norm_type, error_if_nonfinite, foreach)
        total = _total_norm([(tensor, part_of(tensor)) for tensor in grads], norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise NonFiniteError(
                f"torch's clipping by norm was called, but the gradients' norm of order {norm_type} is {total.item()}. "
                "Find the cause, or pass error_if_nonfinite=False to scale by it anyway."
            )
        return total

    return get_total_norm


def _widened_clip(clip: Callable[..., None]) -> Callable[..., None]:
    """Returns torch's `clip_grads_with_norm_`, extended to parts if the norm is that of full gradients."""

    def clip_grads_with_norm_(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        total_norm: torch.Tensor,
        foreach: bool | None = None,
    ) -> None:
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        cut = [
            (parameter, local_shard) for parameter, local_shard in cut_tensors_of(tensors) if parameter.grad is not None
        ]
        if any(not is_part(parameter) for parameter, _ in cut) and not hasattr(total_norm, _FULL):
            raise SpecError(
                "torch's clipping by norm was called for parameters that are cut over ranks, but backward of the "
                "network did not set their gradients, so the norm would cover one rank's parts only. Call "
                "evenly.shards.clip_grad_norm_ instead, before optimizer.step()."
            )
        unguard(tensors)
        clip(tensors, max_norm, total_norm, foreach)
        guard(cut)

    return clip_grads_with_norm_


def _total_norm(grads: list[tuple[torch.Tensor, LocalShard | None]], norm_type: float) -> torch.Tensor:
    if not any(local_shard is not None and local_shard.is_cut for _, local_shard in grads):
        return get_total_norm([grad for grad, _ in grads], norm_type)
    total = _norm_over_ranks(grads, float(norm_type))
    setattr(total, _FULL, True)
    return total


def _norm_over_ranks(grads: list[tuple[torch.Tensor, LocalShard | None]], p: float) -> torch.Tensor:
    if not p > 0:
        raise SpecError(
            f"norm_type={p} was given, but parameters are cut over ranks, and only norms of an order above 0 can be "
            "computed from parts. Give a positive number or math.inf."
        )
    cut = dict.fromkeys(
        local_shard.shard_group for _, local_shard in grads if local_shard is not None and local_shard.is_cut
    )
    grads_by_group: dict[ShardGroup | None, list[torch.Tensor]] = {shard_group: [] for shard_group in (*cut, None)}
    for grad, local_shard in grads:
        if local_shard is None or local_shard.shard_group not in cut:
            grads_by_group[None].append(grad)
        elif local_shard.is_cut or local_shard.shard_group.rank == 0:  # one rank counts what all of them hold
            grads_by_group[local_shard.shard_group].append(grad)
    dtype = reduce(torch.promote_types, (grad.dtype for grad, _ in grads)).to_real()
    powers = {
        shard_group: _power(grads[0][0].device, _wide_of(dtype), p, group_grads)
        for shard_group, group_grads in grads_by_group.items()
    }
    pending = [shard_group.sum(powers[shard_group], name="clip", largest=p == torch.inf) for shard_group in cut]
    parts = torch.stack([*(one.wait() for one in pending), powers[None]])  # [shard groups + 1, 1 or 2]
    if p == torch.inf:
        largest, is_nan = parts.amax(0)
        return torch.where(is_nan > 0, torch.nan, largest).to(dtype)
    return parts.sum().pow(1 / p).to(dtype)


def _power(device: torch.device, dtype: torch.dtype, p: float, grads: list[torch.Tensor]) -> torch.Tensor:
    """Returns [the sum of |g|^p], or [the largest |g|, whether one is NaN]: a maximum over ranks may lose a NaN."""
    norms = [torch.linalg.vector_norm(grad, p, dtype=_wide(grad)) for grad in grads if grad.numel()]
    values = torch.stack([torch.zeros((), device=device, dtype=dtype), *(norm.to(device, dtype) for norm in norms)])
    if p == torch.inf:
        return torch.stack([values.nan_to_num(0.0, torch.inf).amax(), values.isnan().any().to(dtype)])
    return values.pow(p).sum(0, keepdim=True)


def _wide(x: torch.Tensor) -> torch.dtype | None:
    return None if x.is_complex() else _wide_of(x.dtype)


def _wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
