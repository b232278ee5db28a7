"""Tries an optimizer on small tensors: one copy steps on whole tensors, others on parts of them."""

from collections import deque
from collections.abc import Callable, Sequence
from numbers import Real

import torch
from torch.optim.optimizer import Optimizer

from evenly._torch.optimizers import STEP_HOOKS
from evenly.shards.optim.copies import OptimizerCopy, ParameterKind, draw, kind_of
from evenly.shards.optim.optimizers import Adafactor, Lamb
from evenly.shards.parts.guard import trial_mode

RANK_SUMMING = (Adafactor, Lamb)  # exact on cut parameters, but not elementwise
TOLERANCE = 1e-12
RAMP = tuple(10.0**power for power in range(-8, 11, 2))  # of gradients, increasing: each still affects the result
RATIO = 100.0  # of two successive scales of the ramp
SCALES = (1.0, 1e-4, 1e4)  # then in turn: some optimizers clip


def describe_difference(
    optimizer: Optimizer,
    sizes: Sequence[int],
    steps: int,
    representatives: list[list[int]] | None,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> str | None:
    """Returns a description of what differs between a copy on whole tensors and one on parts, or None."""
    whole = TrialRun(optimizer, sizes, None, representatives, args, kwargs)
    parts = [
        TrialRun(optimizer, sizes, part_indices, representatives, args, kwargs)
        for part_indices in (_outer_indices, _inner_indices)
    ]
    kinds = {index: kind_of(parameter) for index, parameter in whole.numbered_parameters}
    means = {index: draw(kind, sizes, seed=1000 + index) for index, kind in kinds.items()}
    spreads = {index: _spread(kind, means[index]) for index, kind in kinds.items()}
    for step in range(steps):
        scale = RAMP[step] if step < len(RAMP) else SCALES[step % len(SCALES)]
        noise = {index: draw(kind, sizes, seed=2000 + 97 * index + step) for index, kind in kinds.items()}
        grads = {index: (means[index] + noise[index]) * spreads[index] * scale for index in kinds}
        for run in (whole, *parts):
            run.step(grads, scale)
        for part in parts:
            if (difference := part.difference(whole, is_last=step == steps - 1)) is not None:
                name, kind = difference
                where = f", cut along dim {kind.dim}," if kind is not None and kind.dim is not None else ","
                return (
                    f"it is not elementwise: on parts of tensors of {list(sizes)}{where} its {name} differs "
                    "from that on the whole ones"
                )
    if not whole.has_moved():
        return f"it could not be tried out: it does not move tensors of {list(sizes)} to finite numbers"
    return None


def _spread(kind: ParameterKind, like: torch.Tensor) -> torch.Tensor:
    """Returns factors that make the inner indices of the cut dim `RATIO` times as large as the outer ones.

    At some scale of the ramp, any threshold then lies between the norms of a part and of the whole.
    """
    factors = torch.full_like(like, RATIO)
    if kind.dim is not None:
        factors.index_fill_(kind.dim, _outer_indices(like.shape[kind.dim]).to(like.device), 1.0)
    return factors


def _outer_indices(size: int) -> torch.Tensor:
    """Returns the first and the last index."""
    return torch.tensor(sorted({0, size - 1}))


def _inner_indices(size: int) -> torch.Tensor:
    """Returns all other indices."""
    return torch.arange(1, size - 1)


class TrialRun:
    """A copy of an optimizer on whole stand-ins, or on parts of them."""

    def __init__(
        self,
        optimizer: Optimizer,
        sizes: Sequence[int],
        part_indices: Callable[[int], torch.Tensor] | None,
        representatives: list[list[int]] | None,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        self._args, self._kwargs = args, kwargs
        self.optimizer_copy = OptimizerCopy(optimizer, sizes, part_indices, representatives)
        if type(optimizer) in RANK_SUMMING:  # only their hooks are tried
            self.optimizer_copy.optimizer = _sgd_with_hooks_of(self.optimizer_copy.optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        copied_ids = {id(p) for group in self.optimizer_copy.optimizer.param_groups for p in group["params"]}
        self.numbered_parameters = [
            (n, p) for n, p in enumerate(parameters) if id(self.optimizer_copy.stand_in(p)) in copied_ids
        ]
        self._starts = [self.optimizer_copy.stand_in(p).detach().clone() for _, p in self.numbered_parameters]

    def step(self, grads: dict[int, torch.Tensor], scale: float) -> None:
        """Makes one step with this copy's part of the gradients."""
        self._set_grads(grads, scale)

        def closure() -> torch.Tensor:
            self._set_grads(grads, scale)
            return torch.tensor(scale, dtype=torch.float64)

        args = [closure if callable(value) else value for value in self._args]
        kwargs = {key: closure if callable(value) else value for key, value in self._kwargs.items()}
        with trial_mode.on():
            step: Callable[..., object] = self.optimizer_copy.optimizer.step
            step(*args, **kwargs)

    def _set_grads(self, grads: dict[int, torch.Tensor], scale: float) -> None:
        for index, parameter in self.numbered_parameters:
            stand_in = self.optimizer_copy.stand_in(parameter)
            grad = self.optimizer_copy.part(grads[index], kind_of(parameter))
            stand_in.grad = grad + 0.01 * scale * stand_in.detach().tanh()  # a closure may be called after a change

    def difference(self, whole: "TrialRun", *, is_last: bool) -> tuple[str, ParameterKind | None] | None:
        """Returns the name and kind of the first value that differs from the copy on whole tensors, or None."""
        for _, parameter in self.numbered_parameters:
            kind = kind_of(parameter)
            part_tensor, whole_tensor = (
                self.optimizer_copy.stand_in(parameter),
                whole.optimizer_copy.stand_in(parameter),
            )
            pairs: dict[str, tuple[object, object]] = {"parameter": (part_tensor, whole_tensor)}
            if is_last:
                part_state, whole_state = self._state(part_tensor), whole._state(whole_tensor)
                pairs |= {
                    f"state{name}": (part_state.get(name), whole_state.get(name))
                    for name in {**part_state, **whole_state}
                }
            for name, (one, other) in pairs.items():
                if isinstance(other, torch.Tensor) and other.shape == whole_tensor.shape:
                    other = self.optimizer_copy.part(other.detach(), kind)
                if not _is_same(one, other):
                    return name, kind
        if is_last:
            groups = zip(
                self.optimizer_copy.optimizer.param_groups, whole.optimizer_copy.optimizer.param_groups, strict=True
            )
            for part_group, whole_group in groups:
                for name, value in part_group.items():
                    if isinstance(value, Real | torch.Tensor) and not _is_same(value, whole_group.get(name)):
                        return f"option {name}", None
        return None

    def has_moved(self) -> bool:
        """Returns whether a parameter has changed, and all are finite."""
        now = [self.optimizer_copy.stand_in(p).detach() for _, p in self.numbered_parameters]
        is_same = all(torch.equal(one, start) for one, start in zip(now, self._starts, strict=True))
        return not is_same and all(bool(one.isfinite().all()) for one in now)

    def _state(self, stand_in: torch.Tensor) -> dict[str, object]:
        return _leaves("", self.optimizer_copy.optimizer.state.get(stand_in, {}))


def _sgd_with_hooks_of(optimizer: Optimizer) -> Optimizer:
    """Returns SGD, which is elementwise, with the groups and the hooks of another optimizer."""
    sgd = torch.optim.SGD([{"params": group["params"]} for group in optimizer.param_groups], lr=0.1)
    for name in STEP_HOOKS:
        vars(sgd)[name] = vars(optimizer)[name]
    for sgd_group, group in zip(sgd.param_groups, optimizer.param_groups, strict=True):
        sgd_group.update({key: value for key, value in group.items() if key not in sgd_group})
    return sgd


def _leaves(name: str, value: object) -> dict[str, object]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _leaves(f"{name} {key}", item).items()}
    if isinstance(value, list | tuple | deque):
        return {k: v for index, item in enumerate(value) for k, v in _leaves(f"{name} {index}", item).items()}
    if isinstance(value, Real | torch.Tensor | str | torch.dtype | None):
        return {name: value}
    raise TypeError(f"its state{name} is a {type(value).__name__}, and it is unknown whether that depends on the cut")


def _is_same(one: object, other: object) -> bool:
    if not (isinstance(one, Real | torch.Tensor) and isinstance(other, Real | torch.Tensor)):
        return bool(one == other)
    a, b = torch.as_tensor(one).detach(), torch.as_tensor(other).detach()
    if a.shape != b.shape:
        return False
    if torch.equal(a, b):  # the usual case, and the fastest check
        return True
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    finite = b[b.isfinite()].abs()
    slack = TOLERANCE * finite.max().item() if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=slack, equal_nan=True)
