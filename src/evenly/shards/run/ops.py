"""Operations whose local form differs from torch's: they sum over ranks, or use positions in the full tensor."""

from collections.abc import Sequence
from math import prod
from typing import Literal, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from evenly._torch import pytree
from evenly._torch.modules import BatchNorm
from evenly._torch.operators import assert_async
from evenly.comm import Redistribute, ShardGroup
from evenly.spec.layout import Segments


class AutogradContext(Protocol):
    """The `ctx` of a `torch.autograd.Function`, as torch makes it; each function adds its own fields."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Makes these the `saved_tensors` of backward."""

    def set_materialize_grads(self, value: bool) -> None:
        """Says whether backward gets zeros, and not None, for outputs without a gradient."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Declares outputs that get no gradient."""


Dependence = Literal["gradient", "product", "all"]


class _ZerosContext(AutogradContext, Protocol):
    inputs: list[tuple[torch.Size, torch.dtype, torch.device]]
    dependence: Dependence


class _LinkedZeros(torch.autograd.Function):
    """Zeros that depend on tensors in autograd's graph, so that backward runs on a rank that computes nothing."""

    @staticmethod
    def forward(
        ctx: _ZerosContext, shape: Sequence[int], dependence: Dependence, like: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.inputs = [(x.shape, x.dtype, x.device) for x in (like, *inputs)]
        ctx.dependence = dependence
        ctx.save_for_backward(*([] if dependence == "gradient" else [like, *inputs]))
        return like.new_zeros(tuple(shape))

    @staticmethod
    def backward(ctx: _ZerosContext, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not torch.is_grad_enabled():
            zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.inputs)
            return None, None, *zeros
        linked: list[torch.Tensor] = []  # with create_graph=True they belong to the graph, as on the other ranks
        for index, (shape, dtype, device) in enumerate(ctx.inputs):
            factors: Sequence[torch.Tensor] = ctx.saved_tensors
            if ctx.dependence == "product":
                factors = factors[1 - index : 2 - index]  # of the input the weight, of the weight the input
            linked.append(linked_zeros(shape, *(x.to(device, dtype) for x in (gradient, *factors)), dependence="all"))
        return None, None, *linked


def linked_zeros(shape: Sequence[int], *inputs: torch.Tensor, dependence: Dependence = "gradient") -> torch.Tensor:
    """Returns zeros of `shape` whose gradient reaches the inputs as zeros.

    Args:
        shape: that of the zeros.
        *inputs: tensors that get a gradient of zeros.
        dependence: what the gradients of the operation depend on, for gradients of gradients: only the gradient of its
            output ("gradient"), also the other factor of a product of two inputs ("product"), or also all inputs.
    """
    zeros: torch.Tensor = _LinkedZeros.apply(shape, dependence, *inputs)  # type: ignore[no-untyped-call]  # torch has no annotation here
    return zeros


class _SavingLast(torch.autograd.Function):
    """Returns its input and saves an empty tensor."""

    @staticmethod
    def forward(ctx: AutogradContext, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def save_last(outputs: object) -> object:
    """Returns the outputs of a network; the last tensor that its forward saves for backward is saved here.

    An activation checkpoint ends the second forward once all tensors are saved again. That must not be before the last
    message: other ranks may save other tensors, and would wait for this one.
    """
    leaves, spec = pytree.tree_flatten(outputs)
    hooked = [isinstance(x, torch.Tensor) and x.requires_grad for x in leaves]
    if any(hooked):
        index = hooked.index(True)
        leaves[index] = _SavingLast.apply(leaves[index])  # type: ignore[no-untyped-call]  # torch has no annotation here
    return pytree.tree_unflatten(leaves, spec)


def _summed_for_ranks(x: torch.Tensor, shard_group: ShardGroup) -> torch.Tensor:
    """Returns the sum over ranks, which each rank uses for its own part; differentiable as often as needed."""
    return Redistribute(shard_group, "copy")(Redistribute(shard_group, "reduce")(x))


class _StandardContext(AutogradContext, Protocol):
    dims: tuple[int, ...]
    count: int
    eps: float
    centred: bool
    shard_group: ShardGroup


class _Standard(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) over dims of which this rank holds a part; also mean and variance."""

    @staticmethod
    def forward(
        ctx: _StandardContext,
        x: torch.Tensor,
        dims: tuple[int, ...],
        count: int,
        eps: float,
        centred: bool,
        shard_group: ShardGroup,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = x.float() if x.dtype.itemsize < 4 else x
        mean = wide.new_zeros(())
        if centred:
            mean = shard_group.sum(wide.sum(dims, keepdim=True), name="moments").wait() / count
        shifted = wide - mean
        variance = shard_group.sum((shifted * shifted).sum(dims, keepdim=True), name="moments").wait() / count
        scale = torch.rsqrt(variance + eps)
        ctx.dims = dims
        ctx.count = count
        ctx.eps = eps
        ctx.centred = centred
        ctx.shard_group = shard_group
        ctx.save_for_backward(x, mean, scale)
        ctx.mark_non_differentiable(mean, variance)
        return (shifted * scale).to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: _StandardContext, gradient: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
        x, mean, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            standard = _standard(x, ctx.dims, ctx.count, ctx.eps, ctx.centred, ctx.shard_group)
            return *torch.autograd.grad(standard, x, gradient, create_graph=True), None, None, None, None, None
        standard = ((x.float() if x.dtype.itemsize < 4 else x) - mean) * scale
        wide = gradient.to(standard.dtype)
        slope = (wide * standard).sum(ctx.dims, keepdim=True)
        sums = torch.stack([wide.sum(ctx.dims, keepdim=True), slope]) if ctx.centred else slope[None]
        sums = ctx.shard_group.sum(sums, name="moments").wait() / ctx.count
        back = wide - standard * sums[-1] - (sums[0] if ctx.centred else 0.0)
        return (back * scale).to(gradient.dtype), None, None, None, None, None


def _standard(
    x: torch.Tensor, dims: tuple[int, ...], count: int, eps: float, centred: bool, shard_group: ShardGroup
) -> torch.Tensor:
    """Returns what `_Standard` computes, as operations that can be differentiated twice."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    if centred:
        wide = wide - _summed_for_ranks(wide.sum(dims, keepdim=True), shard_group) / count
    variance = _summed_for_ranks((wide * wide).sum(dims, keepdim=True), shard_group) / count
    return (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def standardize(
    x: torch.Tensor, dims: Sequence[int], count: int, eps: float, shard_group: ShardGroup, *, centred: bool = True
) -> torch.Tensor:
    """Returns x with mean 0 and variance 1 over `dims`, `count` elements of all ranks together."""
    result: torch.Tensor = _Standard.apply(x, tuple(dims), count, eps, centred, shard_group)[0]  # type: ignore[no-untyped-call]  # torch has no annotation here
    return result


def module_batch_norm(
    x: torch.Tensor, module: BatchNorm, affine: Sequence[torch.Tensor], samples: int, shard_group: ShardGroup
) -> torch.Tensor:
    """Returns a module's batch norm of a batch of which this rank holds a part of `samples`; counts the batch."""
    weight, bias = affine if affine else (None, None)
    mean, variance = module.running_mean, module.running_var
    rate = 0.0
    if module.training and mean is not None and variance is not None:
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
        rate = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked or 1)
    is_training = module.training or mean is None
    return batch_norm(x, mean, variance, weight, bias, is_training, rate, module.eps, samples, shard_group)


def batch_norm(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    samples: int,
    shard_group: ShardGroup,
) -> torch.Tensor:
    """Returns the batch norm of a batch of which this rank holds a part of `samples`; updates running statistics."""
    if not training:
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
    dims = (0, *range(2, x.ndim))
    count = samples * prod(x.shape[2:])
    y: torch.Tensor
    y, now_mean, now_variance = _Standard.apply(x, dims, count, eps, True, shard_group)  # type: ignore[no-untyped-call]  # torch has no annotation here
    if mean is not None and variance is not None:
        mean.lerp_(now_mean.view(-1).to(mean.dtype), momentum)
        variance.lerp_(now_variance.view(-1).to(variance.dtype) * (count / max(1, count - 1)), momentum)
    shape = (1, -1, *[1] * (x.ndim - 2))
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    size: int,
    eps: float,
    shard_group: ShardGroup,
) -> torch.Tensor:
    """Returns the layer norm over the last dim, of which this rank holds a part of `size`."""
    y = standardize(x, (-1,), size, eps, shard_group)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, size: int, eps: float | None, shard_group: ShardGroup
) -> torch.Tensor:
    """Returns x divided by its root mean square over the last dim, of which this rank holds a part of `size`."""
    small = torch.finfo(x.dtype).eps if eps is None else eps
    y = standardize(x, (-1,), size, small, shard_group, centred=False)
    return y if weight is None else y * weight


class _GroupContext(AutogradContext, Protocol):
    count: int
    eps: float
    shard_group: ShardGroup


class _GroupStandard(torch.autograd.Function):
    """Group norm without its affine part, where groups span several ranks: sums over channels, then over ranks."""

    @staticmethod
    def forward(
        ctx: _GroupContext, x: torch.Tensor, member: torch.Tensor, count: int, eps: float, shard_group: ShardGroup
    ) -> torch.Tensor:
        # x: [n, channels here, rest], member: [groups, channels here], 1 where a channel is in a group
        wide = x.float() if x.dtype.itemsize < 4 else x
        member = member.to(wide.dtype)

        def over_group(per_channel: torch.Tensor) -> torch.Tensor:
            # [n, channels here] -> the mean of each channel's group, [n, channels here, 1]
            total = shard_group.sum(per_channel @ member.T, name="moments").wait() / count
            return (total @ member).unsqueeze(-1)

        mean = over_group(wide.sum(-1))
        shifted = wide - mean
        scale = torch.rsqrt(over_group((shifted * shifted).sum(-1)) + eps)
        ctx.shard_group = shard_group
        ctx.count, ctx.eps = count, eps
        ctx.save_for_backward(x, mean, scale, member)
        return (shifted * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: _GroupContext, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mean, scale, member = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            standard = _group_standard(x, member, ctx.count, ctx.eps, ctx.shard_group)
            return *torch.autograd.grad(standard, x, gradient, create_graph=True), None, None, None, None
        standard = ((x.float() if x.dtype.itemsize < 4 else x) - mean) * scale
        wide = gradient.to(standard.dtype)
        sums = torch.stack([wide.sum(-1), (wide * standard).sum(-1)]) @ member.T  # [2, n, groups]
        sums = (ctx.shard_group.sum(sums, name="moments").wait() / ctx.count) @ member
        back = (wide - sums[0].unsqueeze(-1) - standard * sums[1].unsqueeze(-1)) * scale
        return back.to(gradient.dtype), None, None, None, None


def _group_standard(
    x: torch.Tensor, member: torch.Tensor, count: int, eps: float, shard_group: ShardGroup
) -> torch.Tensor:
    """Returns what `_GroupStandard` computes, as operations that can be differentiated twice."""
    wide = x.float() if x.dtype.itemsize < 4 else x

    def over_group(per_channel: torch.Tensor) -> torch.Tensor:
        total = _summed_for_ranks(per_channel @ member.T, shard_group) / count
        return (total @ member).unsqueeze(-1)

    shifted = wide - over_group(wide.sum(-1))
    return (shifted * torch.rsqrt(over_group((shifted * shifted).sum(-1)) + eps)).to(x.dtype)


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    channels: int,
    segments: Segments,
    shard_group: ShardGroup,
) -> torch.Tensor:
    """Returns the group norm of a tensor of which this rank holds the channels `segments`."""
    channels_per_group = channels // groups
    group_of_channel = [c // channels_per_group for start, stop in segments for c in range(start, stop)]
    member = torch.zeros(groups, len(group_of_channel), dtype=x.dtype, device=x.device)
    member[group_of_channel, range(len(group_of_channel))] = 1
    flat = x.reshape(x.shape[0], x.shape[1], prod(x.shape[2:]))
    count = channels_per_group * prod(x.shape[2:])
    y: torch.Tensor = _GroupStandard.apply(flat, member, count, eps, shard_group)  # type: ignore[no-untyped-call]  # torch has no annotation here
    y = y.view(x.shape)
    shape = (1, -1, *[1] * (x.ndim - 2))
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def embed_rows(
    ids: torch.Tensor, weight: torch.Tensor, segments: Segments, size: int, padding: int | None
) -> torch.Tensor:
    """Returns this rank's summand of an embedding: zeros for ids whose row another rank holds."""
    local_rows = torch.full((size,), -1, dtype=torch.long, device=ids.device)
    offset = 0
    for start, stop in segments:
        local_rows[start:stop] = torch.arange(offset, offset + stop - start, device=ids.device)
        offset += stop - start
    assert_async((ids >= 0).all())
    local = local_rows[ids]
    if not weight.shape[0]:
        return linked_zeros((*ids.shape, weight.shape[1]), weight)
    local_padding = int(local_rows[padding]) if padding is not None else -1
    rows = F.embedding(local.clamp_min(0), weight, padding_idx=local_padding if local_padding >= 0 else None)
    return rows * (local >= 0).unsqueeze(-1)


class _VocabularyContext(AutogradContext, Protocol):
    dtype: torch.dtype  # of the logits


class _VocabularyLoss(torch.autograd.Function):
    """Cross-entropy of logits [n, classes here, ...] whose classes are cut over ranks; one loss per target."""

    @staticmethod
    def forward(
        ctx: _VocabularyContext,
        logits: torch.Tensor,
        target: torch.Tensor,
        segments: Segments,
        size: int,
        ignored: int,
        shard_group: ShardGroup,
    ) -> torch.Tensor:
        wide = logits.float() if logits.dtype.itemsize < 4 else logits
        rows = wide.movedim(1, -1)  # [n, ..., classes here]
        low = torch.finfo(wide.dtype).min
        peak = rows.amax(-1) if rows.shape[-1] else torch.full_like(target, low, dtype=wide.dtype)
        peak = shard_group.sum(peak, name="vocabulary", largest=True).wait()
        exps = torch.exp(rows - peak.unsqueeze(-1))
        local_index = torch.full_like(target, -1)
        offset = 0
        for start, stop in segments:
            is_local = (target >= start) & (target < stop)
            local_index = torch.where(is_local, target - start + offset, local_index)
            offset += stop - start
        target_logit = torch.zeros_like(peak)
        if rows.shape[-1]:
            picked = rows.gather(-1, local_index.clamp_min(0).unsqueeze(-1)).squeeze(-1) - peak
            target_logit = torch.where(local_index >= 0, picked, target_logit)
        total, chosen = shard_group.sum(torch.stack([exps.sum(-1), target_logit]), name="vocabulary").wait()
        counted = target != ignored
        assert_async((((target >= 0) & (target < size)) | ~counted).all())
        ctx.save_for_backward(exps, total, local_index, counted)
        ctx.dtype = logits.dtype
        return torch.where(counted, total.log() - chosen, torch.zeros_like(total))

    @staticmethod
    @once_differentiable
    def backward(ctx: _VocabularyContext, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exps, total, local_index, counted = ctx.saved_tensors
        back = exps / total.unsqueeze(-1)
        if back.shape[-1]:
            one = (local_index >= 0).to(back.dtype).unsqueeze(-1)
            back = back.scatter_add(-1, local_index.clamp_min(0).unsqueeze(-1), -one)
        back = back * torch.where(counted, gradient, torch.zeros_like(gradient)).unsqueeze(-1)
        return back.movedim(-1, 1).to(ctx.dtype), None, None, None, None, None


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    segments: Segments,
    shard_group: ShardGroup,
    *,
    size: int,
    ignored: int,
    reduction: str,
) -> torch.Tensor:
    """Returns the cross-entropy of logits whose classes (dim 1) are cut over ranks, with two small all-reduces."""
    losses: torch.Tensor = _VocabularyLoss.apply(logits, target, segments, size, ignored, shard_group)  # type: ignore[no-untyped-call]  # torch has no annotation here
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignored).sum()
