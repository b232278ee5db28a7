"""Optimizers that look at more than one element at a time, exact on parameters that are cut over ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, final, overload

import torch
from torch.optim.optimizer import ParamsT

from evenly.comm import ShardGroup
from evenly.errors import SpecError
from evenly.shards.optim.clipping import RankSums, squared_norm
from evenly.shards.parts.local_shards import LocalShard, local_shard_of

State = dict[str, torch.Tensor]


@final
class Adafactor(torch.optim.Adafactor):
    """The numbers of `torch.optim.Adafactor`, with its arguments, on parameters that may be cut over ranks.

    Means over a cut dim and root mean squares are summed over the wire: two messages for each step, whatever the number
    of parameters. All ranks step together; a gradient is None on all of them or on none. `row_var` and `col_var` are
    this rank's part where the dim they keep is cut, and the same on all ranks otherwise (`state_placement`). Norms of
    16-bit parameters are taken in float32; `foreach` changes nothing.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, 2))
        >>> optimizer = Adafactor([weight], lr=0.1)
        >>> weight.grad = torch.ones(3, 2)
        >>> optimizer.step()
        >>> round(weight[0, 0].item(), 4)
        0.9

    Reference: Shazeer and Stern 2018, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost.
    """

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes one step, and returns the closure's loss if one is given."""
        loss = _loss(closure)
        turns = [turn for group in self.param_groups for turn in self._turns(group)]
        for batch in _batches(turns, [turn.shard_group for turn in turns]):
            _advance(batch)
        return loss

    def _turns(self, group: dict[str, Any]) -> "list[_Turn]":
        held = _with_gradient(group, "Adafactor")
        eps1 = group["eps"][0]
        if eps1 is None and held:
            eps1 = torch.finfo(held[0][0].dtype).eps  # of the first parameter, for all: as torch has it
        return [_Turn(parameter, grad, self.state[parameter], group, eps1) for parameter, grad in held]


class _Turn:
    """One parameter in one step of Adafactor, between the messages."""

    def __init__(
        self, parameter: torch.Tensor, grad: torch.Tensor, state: State, group: dict[str, Any], eps1: float
    ) -> None:
        placement = local_shard_of(parameter)
        self.parameter = parameter
        self.state = state
        self.group = group
        self.eps1 = eps1
        self.grad = -grad if group["maximize"] else grad
        self.shape = parameter.shape if placement is None else placement.shape
        self.shard_group = _shard_group(placement)
        self.dim = None if placement is None or placement.dim is None else placement.dim - len(self.shape)
        self.numbers: dict[str, int] = {}
        if not state:
            self._prepare()

    def _prepare(self) -> None:
        shape = list(self.grad.shape)
        self.state["step"] = torch.tensor(0.0, dtype=_step_dtype())
        if len(shape) > 1:
            self.state["row_var"] = self.grad.new_zeros([*shape[:-1], 1])
            self.state["col_var"] = self.grad.new_zeros([*shape[:-2], 1, shape[-1]])
        else:
            self.state["variance"] = torch.zeros_like(self.grad)

    def begin(self, sums: RankSums) -> None:
        """Adds the parameter's squares and what the second moments sum over a cut dim."""
        self.state["step"] += 1
        t = self.state["step"].item()
        self.rate = t ** self.group["beta2_decay"]  # 1 - beta2
        self.rho = min(float(self.group["lr"]), 1 / t**0.5)
        self.numbers["parameter"] = sums.add(squared_norm(self.parameter), self.shard_group)
        if len(self.shape) > 1:
            rows = squared_norm(self.grad, dim=-1)  # [..., m, 1]
            columns = squared_norm(self.grad, dim=-2)  # [..., 1, n]
            self.numbers["columns"] = sums.add(columns, self.shard_group if self.dim == -2 else None)
            if self.dim == -1:
                self.numbers["rows"] = sums.add(rows, self.shard_group)
            else:
                self.numbers["total"] = sums.add(self._blend_rows(rows), self.shard_group if self.dim == -2 else None)

    def estimate(self, totals: Sequence[torch.Tensor], sums: RankSums) -> None:
        """Makes the update and adds its squares."""
        theta, root_n = self.parameter, self.shape.numel() ** 0.5
        rms = totals[self.numbers["parameter"]].sqrt().item() / root_n
        self.alpha = max(self.group["eps"][1], rms) * self.rho
        if self.group["weight_decay"] != 0:
            theta.mul_(1 - float(self.group["lr"]) * self.group["weight_decay"])
        variance = self._factored(totals) if len(self.shape) > 1 else self._plain()
        self.update = variance.clamp_(min=self.eps1 * self.eps1).rsqrt_().mul_(self.grad)
        self.numbers = {"update": sums.add(squared_norm(self.update), self.shard_group)}

    def finish(self, totals: Sequence[torch.Tensor]) -> None:
        """Subtracts the update, clipped by its root mean square."""
        root_n = self.shape.numel() ** 0.5
        norm = totals[self.numbers["update"]].sqrt().item()
        denominator = max(1.0, norm / (root_n * self.group["d"]))
        self.parameter.add_(self.update, alpha=-self.alpha / denominator)

    def _blend_rows(self, rows: torch.Tensor) -> torch.Tensor:
        row_var = self.state["row_var"]
        row_var.lerp_(rows.div_(self.shape[-1]).to(row_var.dtype), self.rate)
        return row_var.to(rows.dtype).sum(dim=-2, keepdim=True)  # [..., 1, 1]

    def _factored(self, totals: Sequence[torch.Tensor]) -> torch.Tensor:
        row_var, col_var = self.state["row_var"], self.state["col_var"]
        total = self._blend_rows(totals[self.numbers["rows"]]) if self.dim == -1 else totals[self.numbers["total"]]
        columns = totals[self.numbers["columns"]].div_(self.shape[-2])
        col_var.lerp_(columns.to(col_var.dtype), self.rate)
        mean = total.div_(self.shape[-2]).clamp_(min=self.eps1)
        return (row_var @ col_var).div_(mean.to(row_var.dtype))

    def _plain(self) -> torch.Tensor:
        variance = self.state["variance"]
        return variance.lerp_(self.grad * self.grad, self.rate).clone()


def _advance(turns: Sequence[_Turn]) -> None:
    moments, updates = RankSums("adafactor"), RankSums("adafactor")
    for turn in turns:
        turn.begin(moments)
    totals = moments.totals()
    for turn in turns:
        turn.estimate(totals, updates)
    totals = updates.totals()
    for turn in turns:
        turn.finish(totals)


@final
class Lamb(torch.optim.Optimizer):
    r"""LAMB, on parameters that may be cut over ranks: every tensor steps by a share of its own full norm.

    .. math::
        m = \beta_1 m + (1 - \beta_1) g, \quad v = \beta_2 v + (1 - \beta_2) g^2 \\
        u = \hat m / (\sqrt{\hat v} + \epsilon) + \lambda x, \quad x = x - \eta \|x\| / \|u\| \cdot u

    The ratio of norms is 1 where one of them is 0. All norms of a step are summed over the wire in one message. All
    ranks step together; a gradient is None on all of them or on none.

    Args:
        params: parameters or groups of them.
        lr: the step size eta.
        betas: decay of the first and the second moment.
        eps: what keeps the denominator above 0.
        weight_decay: lambda.

    Reference: You et al. 2020, Large Batch Optimization for Deep Learning: Training BERT in 76 minutes.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if not (float(lr) >= 0 and all(0 <= beta < 1 for beta in betas) and eps >= 0 and weight_decay >= 0):
            raise SpecError(
                f"Lamb was asked for with lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}, and one of "
                "them is out of range. Give betas from 0 to below 1, and the others of at least 0."
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes one step, and returns the closure's loss if one is given."""
        loss = _loss(closure)
        turns = [(*held, group) for group in self.param_groups for held in _with_gradient(group, "Lamb")]
        for batch in _batches(turns, [_shard_group(local_shard_of(x)) for x, _, _ in turns]):
            self._advance(batch)
        return loss

    def _advance(self, turns: Sequence[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]) -> None:
        sums = RankSums("lamb")
        updates: list[torch.Tensor] = []
        for x, g, group in turns:
            u, shard_group = self._update(x, g, group), _shard_group(local_shard_of(x))
            sums.add(squared_norm(x), shard_group)
            sums.add(squared_norm(u), shard_group)
            updates.append(u)
        norms = [total.sqrt() for total in sums.totals()]
        for (x, _, group), u, of_x, of_u in zip(turns, updates, norms[::2], norms[1::2], strict=True):
            ratio = torch.where((of_x > 0) & (of_u > 0), of_x / of_u, 1.0)
            x.sub_(u.mul_((float(group["lr"]) * ratio).to(u.device)))

    def _update(self, x: torch.Tensor, g: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state: State = self.state[x]
        beta1, beta2 = group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=_step_dtype())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(x), torch.zeros_like(x)
        state["step"] += 1
        t = state["step"].item()
        m = state["exp_avg"].lerp_(g, 1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v / (1 - beta2**t)).sqrt_().add_(group["eps"])
        update: torch.Tensor = m / (1 - beta1**t)
        return update.div_(denominator).add_(x, alpha=group["weight_decay"])


def state_placement(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, value: Any
) -> LocalShard | None:
    """Returns how one entry of a parameter's optimizer state is cut; None for what has no place of its own.

    An entry of the local parameter's shape lies as the parameter does. Adafactor's `row_var` and `col_var` have a size
    of 1 instead of the last dim and the last but one: where that dim is the cut one, all ranks hold all of it. Numbers
    such as `step` are the same on all ranks and get None, as does every entry of a parameter without a placement.
    """
    placement = local_shard_of(parameter)
    if placement is None or not isinstance(value, torch.Tensor):
        return None
    if isinstance(optimizer, torch.optim.Adafactor) and key in ("row_var", "col_var"):
        lost = len(placement.shape) - (1 if key == "row_var" else 2)
        shape = torch.Size([1 if dim == lost else size for dim, size in enumerate(placement.shape)])
        if placement.dim == lost:
            return replace(placement, shape=shape, dim=None, segments=())
        return replace(placement, shape=shape)
    return placement if key != "step" and value.shape == parameter.shape else None


T = TypeVar("T")


def _batches(turns: Sequence[T], shard_groups: Sequence[ShardGroup | None]) -> Iterator[list[T]]:
    """Yields all cut parameters, to share their messages, then each whole one, to hold one update at a time."""
    yield [turn for turn, shard_group in zip(turns, shard_groups, strict=True) if shard_group is not None]
    for turn, shard_group in zip(turns, shard_groups, strict=True):
        if shard_group is None:
            yield [turn]


def _shard_group(placement: LocalShard | None) -> ShardGroup | None:
    return placement.shard_group if placement is not None and placement.is_cut else None


def _with_gradient(group: dict[str, Any], name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    held: list[tuple[torch.Tensor, torch.Tensor]] = [(p, p.grad) for p in group["params"] if p.grad is not None]
    for parameter, grad in held:
        if parameter.is_complex() or grad.is_sparse:
            raise SpecError(
                f"{name} was asked to step on a parameter of {list(parameter.shape)} that is complex or has a sparse "
                "gradient, which it cannot. Use dense real parameters, or another optimizer for this one."
            )
    return held


def _loss(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _step_dtype() -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
