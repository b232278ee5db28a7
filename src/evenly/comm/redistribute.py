"""The six redistributions of a tensor, each a linear map over ranks and its adjoint.

| move | forward | backward |
|---|---|---|
| copy | nothing | sum |
| reduce | sum | nothing |
| reduce_scatter | scattered sum | gather |
| gather_for_ranks | gather | scattered sum |
| gather_for_all | gather | own part |
| slice | own part | gather |
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from evenly.comm.indexing.segments import Segments, take
from evenly.comm.shard_group import PendingTensor, ShardGroup

Map = Literal["same", "sum", "gather", "scatter_sum", "take"]

MOVES: dict[str, tuple[Map, Map]] = {
    "copy": ("same", "sum"),
    "reduce": ("sum", "same"),
    "reduce_scatter": ("scatter_sum", "gather"),
    "gather_for_ranks": ("gather", "scatter_sum"),
    "gather_for_all": ("gather", "take"),
    "slice": ("take", "gather"),
}
ADJOINTS = {
    "copy": "reduce",
    "reduce": "copy",
    "reduce_scatter": "gather_for_ranks",
    "gather_for_ranks": "reduce_scatter",
    "gather_for_all": "slice",
    "slice": "gather_for_all",
}


@dataclass(frozen=True)
class Redistribute:
    """One redistribution; `segments` are the indices of `dim` that each rank holds on the sharded side."""

    shard_group: ShardGroup
    name: str
    dim: int = 0
    segments: Sequence[Segments] = ()

    def forward(self, x: torch.Tensor) -> PendingTensor:
        """Starts the redistribution."""
        return self._start(MOVES[self.name][0], x)

    def backward(self, gradient: torch.Tensor) -> PendingTensor:
        """Starts the adjoint redistribution of a gradient."""
        return self._start(MOVES[self.name][1], gradient)

    @property
    def adjoint(self) -> "Redistribute":
        """The redistribution of the gradient, as one that can be differentiated again."""
        return replace(self, name=ADJOINTS[self.name])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the redistributed tensor, differentiable."""
        result: torch.Tensor = _Redistributed.apply(x, self)  # type: ignore[no-untyped-call]  # torch has no annotation here
        return result

    def _start(self, kind: Map, x: torch.Tensor) -> PendingTensor:
        match kind:
            case "sum":
                return self.shard_group.sum(x, name=self.name)
            case "gather":
                return self.shard_group.gather(x, self.dim, self.segments, name=self.name)
            case "scatter_sum":
                return self.shard_group.scatter_sum(x, self.dim, self.segments, name=self.name)
            case "take":
                return PendingTensor(lambda: take(x, self.dim, self.segments[self.shard_group.rank]))
            case _:
                return PendingTensor(lambda: x)


def copy_together(tensors: Sequence[torch.Tensor], shard_group: ShardGroup) -> tuple[torch.Tensor, ...]:
    """Returns the tensors, as several copies would; their gradients are summed over ranks all at once.

    The sums begin when the last gradient is there, one after another without work between them: ranks that differ in
    speed wait for each other once.
    """
    copies: tuple[torch.Tensor, ...] = _CopiedTogether.apply(Redistribute(shard_group, "copy"), *tensors)  # type: ignore[no-untyped-call]  # torch has no annotation here
    return copies


class _Context(Protocol):
    """What forward leaves for backward in autograd's context."""

    redistribute: Redistribute

    def set_materialize_grads(self, value: bool) -> None:
        """Whether gradients that are missing are zeros for backward."""


class _Redistributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, redistribute: Redistribute) -> torch.Tensor:
        ctx.redistribute = redistribute
        result = redistribute.forward(x).wait()
        return result.view_as(result) if result is x else result

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with ctx.redistribute.shard_group.reporting():
            if torch.is_grad_enabled():  # create_graph=True
                return ctx.redistribute.adjoint(gradient), None
            return ctx.redistribute.backward(gradient).wait(), None


class _CopiedTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, redistribute: Redistribute, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.redistribute = redistribute
        ctx.set_materialize_grads(False)  # of tensors that the loss does not depend on, on any rank
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with ctx.redistribute.shard_group.reporting():
            if torch.is_grad_enabled():  # create_graph=True
                adjoint = ctx.redistribute.adjoint
                return None, *(None if gradient is None else adjoint(gradient) for gradient in gradients)
            sums = [None if gradient is None else ctx.redistribute.backward(gradient) for gradient in gradients]
            return None, *(None if pending is None else pending.wait() for pending in sums)
