"""Optimizers that are not elementwise, exact on parameters that are cut over ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, final, overload

import torch
from torch.optim.optimizer import ParamsT

from evenly.comm import ShardGroup
from evenly.errors import SpecError
from evenly.shards.optim.clipping import RankSums, squared_norm
from evenly.shards.parts.local_shards import LocalShard, local_shard_of

ParamGroup = dict[str, Any]  # an entry of torch's `param_groups`: "params", and options that each class names
State = dict[str, torch.Tensor]


@final
class Adafactor(torch.optim.Adafactor):
    """Gives the results of `torch.optim.Adafactor`, with its arguments, on parameters that may be cut over ranks.

    Means over a cut dim and root mean squares are summed over the shard group: two all-reduces for each step, whatever
    the number of parameters. All ranks step together; a gradient is None on all of them or on none. `row_var` and
    `col_var` are this rank's part where the dim they keep is cut, and equal on all ranks otherwise (`state_placement`).
    Norms of 16-bit parameters are computed in float32; `foreach` has no effect.

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
        """Makes one step; returns the loss of the closure, if there is one."""
        loss = _loss(closure)
        parameter_steps = [
            parameter_step for group in self.param_groups for parameter_step in self._parameter_steps(group)
        ]
        for batch in _batches(parameter_steps, [parameter_step.shard_group for parameter_step in parameter_steps]):
            _advance(batch)
        return loss

    def _parameter_steps(self, group: ParamGroup) -> "list[_ParameterStep]":
        with_gradient = _with_gradient(group, "Adafactor")
        eps1 = group["eps"][0]
        if eps1 is None and with_gradient:
            eps1 = torch.finfo(with_gradient[0][0].dtype).eps  # of the first parameter, for all, as in torch
        return [
            _ParameterStep(parameter, grad, self.state[parameter], group, eps1) for parameter, grad in with_gradient
        ]


class _ParameterStep:
    """One parameter in one step of Adafactor: the computations before, between and after the all-reduces."""

    def __init__(
        self, parameter: torch.Tensor, grad: torch.Tensor, state: State, group: ParamGroup, eps1: float
    ) -> None:
        local_shard = local_shard_of(parameter)
        self.parameter = parameter
        self.state = state
        self.group = group
        self.eps1 = eps1
        self.grad = -grad if group["maximize"] else grad
        self.shape = parameter.shape if local_shard is None else local_shard.shape
        self.shard_group = _shard_group(local_shard)
        self.dim = None if local_shard is None or local_shard.dim is None else local_shard.dim - len(self.shape)
        self.sum_indices: dict[str, int] = {}  # in RankSums
        if not state:
            self._init_state()

    def _init_state(self) -> None:
        shape = list(self.grad.shape)
        self.state["step"] = torch.tensor(0.0, dtype=_step_dtype())
        if len(shape) > 1:
            self.state["row_var"] = self.grad.new_zeros([*shape[:-1], 1])
            self.state["col_var"] = self.grad.new_zeros([*shape[:-2], 1, shape[-1]])
        else:
            self.state["variance"] = torch.zeros_like(self.grad)

    def begin(self, sums: RankSums) -> None:
        """Adds the parameter's sum of squares and the sums of the second moments over a cut dim."""
        self.state["step"] += 1
        t = self.state["step"].item()
        self.rate = t ** self.group["beta2_decay"]  # 1 - beta2
        self.rho = min(float(self.group["lr"]), 1 / t**0.5)
        self.sum_indices["parameter"] = sums.add(squared_norm(self.parameter), self.shard_group)
        if len(self.shape) > 1:
            rows = squared_norm(self.grad, dim=-1)  # [..., m, 1]
            columns = squared_norm(self.grad, dim=-2)  # [..., 1, n]
            self.sum_indices["columns"] = sums.add(columns, self.shard_group if self.dim == -2 else None)
            if self.dim == -1:
                self.sum_indices["rows"] = sums.add(rows, self.shard_group)
            else:
                self.sum_indices["total"] = sums.add(
                    self._blend_rows(rows), self.shard_group if self.dim == -2 else None
                )

    def estimate(self, totals: Sequence[torch.Tensor], sums: RankSums) -> None:
        """Computes the update and adds its sum of squares."""
        theta, root_n = self.parameter, self.shape.numel() ** 0.5
        rms = totals[self.sum_indices["parameter"]].sqrt().item() / root_n
        self.alpha = max(self.group["eps"][1], rms) * self.rho
        if self.group["weight_decay"] != 0:
            theta.mul_(1 - float(self.group["lr"]) * self.group["weight_decay"])
        variance = self._factored(totals) if len(self.shape) > 1 else self._unfactored()
        self.update = variance.clamp_(min=self.eps1 * self.eps1).rsqrt_().mul_(self.grad)
        self.sum_indices = {"update": sums.add(squared_norm(self.update), self.shard_group)}

    def finish(self, totals: Sequence[torch.Tensor]) -> None:
        """Subtracts the update, clipped by its root mean square."""
        root_n = self.shape.numel() ** 0.5
        norm = totals[self.sum_indices["update"]].sqrt().item()
        denominator = max(1.0, norm / (root_n * self.group["d"]))
        self.parameter.add_(self.update, alpha=-self.alpha / denominator)

    def _blend_rows(self, rows: torch.Tensor) -> torch.Tensor:
        row_var = self.state["row_var"]
        row_var.lerp_(rows.div_(self.shape[-1]).to(row_var.dtype), self.rate)
        return row_var.to(rows.dtype).sum(dim=-2, keepdim=True)  # [..., 1, 1]

    def _factored(self, totals: Sequence[torch.Tensor]) -> torch.Tensor:
        row_var, col_var = self.state["row_var"], self.state["col_var"]
        total = (
            self._blend_rows(totals[self.sum_indices["rows"]]) if self.dim == -1 else totals[self.sum_indices["total"]]
        )
        columns = totals[self.sum_indices["columns"]].div_(self.shape[-2])
        col_var.lerp_(columns.to(col_var.dtype), self.rate)
        mean = total.div_(self.shape[-2]).clamp_(min=self.eps1)
        return (row_var @ col_var).div_(mean.to(row_var.dtype))

    def _unfactored(self) -> torch.Tensor:
        variance = self.state["variance"]
        return variance.lerp_(self.grad * self.grad, self.rate).clone()


def _advance(parameter_steps: Sequence[_ParameterStep]) -> None:
    moments, updates = RankSums("adafactor"), RankSums("adafactor")
    for parameter_step in parameter_steps:
        parameter_step.begin(moments)
    totals = moments.totals()
    for parameter_step in parameter_steps:
        parameter_step.estimate(totals, updates)
    totals = updates.totals()
    for parameter_step in parameter_steps:
        parameter_step.finish(totals)


@final
class Lamb(torch.optim.Optimizer):
    r"""LAMB, on parameters that may be cut over ranks: the step of every tensor is scaled by its full norm.

    .. math::
        m = \beta_1 m + (1 - \beta_1) g, \quad v = \beta_2 v + (1 - \beta_2) g^2 \\
        u = \hat m / (\sqrt{\hat v} + \epsilon) + \lambda x, \quad x = x - \eta \|x\| / \|u\| \cdot u

    The ratio of norms is 1 where one of them is 0. One all-reduce for each step sums all norms. All ranks step
    together; a gradient is None on all of them or on none.

    Args:
        params: parameters or groups of them.
        lr: the step size eta.
        betas: decay of the first and the second moment.
        eps: is added to the denominator.
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
        """Makes one step; returns the loss of the closure, if there is one."""
        loss = _loss(closure)
        parameter_steps = [(*pair, group) for group in self.param_groups for pair in _with_gradient(group, "Lamb")]
        for batch in _batches(parameter_steps, [_shard_group(local_shard_of(x)) for x, _, _ in parameter_steps]):
            self._advance(batch)
        return loss

    def _advance(self, parameter_steps: Sequence[tuple[torch.Tensor, torch.Tensor, ParamGroup]]) -> None:
        sums = RankSums("lamb")
        updates: list[torch.Tensor] = []
        for x, g, group in parameter_steps:
            u, shard_group = self._update(x, g, group), _shard_group(local_shard_of(x))
            sums.add(squared_norm(x), shard_group)
            sums.add(squared_norm(u), shard_group)
            updates.append(u)
        norms = [total.sqrt() for total in sums.totals()]
        for (x, _, group), u, of_x, of_u in zip(parameter_steps, updates, norms[::2], norms[1::2], strict=True):
            ratio = torch.where((of_x > 0) & (of_u > 0), of_x / of_u, 1.0)
            x.sub_(u.mul_((float(group["lr"]) * ratio).to(u.device)))

    def _update(self, x: torch.Tensor, g: torch.Tensor, group: ParamGroup) -> torch.Tensor:
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
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, value: object
) -> LocalShard | None:
    """Returns how one entry of a parameter's optimizer state is cut; None if it has no local shard.

    An entry of the local parameter's shape is cut as the parameter is. Adafactor's `row_var` and `col_var` have size 1
    in the last dim and the last but one: if that dim is the cut one, the entry is replicated. Numbers such as `step`
    are equal on all ranks and get None, as does every entry of a parameter without a local shard.
    """
    local_shard = local_shard_of(parameter)
    if local_shard is None or not isinstance(value, torch.Tensor):
        return None
    if isinstance(optimizer, torch.optim.Adafactor) and key in ("row_var", "col_var"):
        reduced_dim = len(local_shard.shape) - (1 if key == "row_var" else 2)
        shape = torch.Size([1 if dim == reduced_dim else size for dim, size in enumerate(local_shard.shape)])
        if local_shard.dim == reduced_dim:
            return replace(local_shard, shape=shape, dim=None, segments=())
        return replace(local_shard, shape=shape)
    return local_shard if key != "step" and value.shape == parameter.shape else None


T = TypeVar("T")


def _batches(parameter_steps: Sequence[T], shard_groups: Sequence[ShardGroup | None]) -> Iterator[list[T]]:
    """Yields all cut parameters together, to share all-reduces, then each whole one alone, to save memory."""
    yield [
        parameter_step
        for parameter_step, shard_group in zip(parameter_steps, shard_groups, strict=True)
        if shard_group is not None
    ]
    for parameter_step, shard_group in zip(parameter_steps, shard_groups, strict=True):
        if shard_group is None:
            yield [parameter_step]


def _shard_group(local_shard: LocalShard | None) -> ShardGroup | None:
    return local_shard.shard_group if local_shard is not None and local_shard.is_cut else None


def _with_gradient(group: ParamGroup, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = [(p, p.grad) for p in group["params"] if p.grad is not None]
    for parameter, grad in pairs:
        if parameter.is_complex() or grad.is_sparse:
            raise SpecError(
                f"{name} was asked to step on a parameter of {list(parameter.shape)} that is complex or has a sparse "
                "gradient, which it cannot. Use dense real parameters, or another optimizer for this one."
            )
    return pairs


def _loss(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _step_dtype() -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
