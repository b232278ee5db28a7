"""An optimizer tried on small tensors: one copy steps on whole ones, others on parts of them."""

from collections import deque
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from evenly._torch.optimizers import STEP_HOOKS
from evenly.shards.optim.copies import Kind, OptimizerCopy, draw, kind_of
from evenly.shards.optim.optimizers import Adafactor, Lamb
from evenly.shards.parts.guard import trial

EXACT = (Adafactor, Lamb)  # they sum over ranks
TOLERANCE = 1e-12
RAMP = tuple(10.0**power for power in range(-8, 11, 2))  # of gradients, upwards first: each still shows in the result
RATIO = 100.0  # of two scales of the ramp
SCALES = (1.0, 1e-4, 1e4)  # then in turn: some clip


def compare(
    optimizer: Optimizer,
    sizes: Sequence[int],
    steps: int,
    kept: list[list[int]] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str | None:
    """Returns what differs between a copy on whole tensors and one on parts of them, in words."""
    whole = TrialRun(optimizer, sizes, None, kept, args, kwargs)
    parts = [TrialRun(optimizer, sizes, chosen, kept, args, kwargs) for chosen in (_outer, _inner)]
    kinds = {index: kind_of(parameter) for index, parameter in whole.owners}
    drifts = {index: draw(kind, sizes, seed=1000 + index) for index, kind in kinds.items()}
    spreads = {index: _spread(kind, drifts[index]) for index, kind in kinds.items()}
    for step in range(steps):
        scale = RAMP[step] if step < len(RAMP) else SCALES[step % len(SCALES)]
        noise = {index: draw(kind, sizes, seed=2000 + 97 * index + step) for index, kind in kinds.items()}
        grads = {index: (drifts[index] + noise[index]) * spreads[index] * scale for index in kinds}
        for run in (whole, *parts):
            run.step(grads, scale)
        for part in parts:
            if (clash := part.clash(whole, is_last=step == steps - 1)) is not None:
                name, kind = clash
                where = f", cut along dim {kind.dim}," if kind is not None and kind.dim is not None else ","
                return (
                    f"it is not elementwise: on parts of tensors of {list(sizes)}{where} its {name} came out other "
                    "than on the whole ones"
                )
    if not whole.has_moved():
        return f"it could not be tried out: it does not move tensors of {list(sizes)} to finite numbers"
    return None


def _spread(kind: Kind, like: torch.Tensor) -> torch.Tensor:
    """Returns factors that make the inner indices of the cut dim `RATIO` times as large as the outer ones.

    A threshold of any norm then lies between that of the whole and that of a part at some scale of the ramp.
    """
    factors = torch.full_like(like, RATIO)
    if kind.dim is not None:
        factors.index_fill_(kind.dim, _outer(like.shape[kind.dim]).to(like.device), 1.0)
    return factors


def _outer(size: int) -> torch.Tensor:
    """Returns the first and the last index."""
    return torch.tensor(sorted({0, size - 1}))


def _inner(size: int) -> torch.Tensor:
    return torch.arange(1, size - 1)


class TrialRun:
    """A copy of an optimizer on whole stand-ins, or on parts of them."""

    def __init__(
        self,
        optimizer: Optimizer,
        sizes: Sequence[int],
        chosen: Callable[[int], torch.Tensor] | None,
        kept: list[list[int]] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._args, self._kwargs = args, kwargs
        self.optimizer_copy = OptimizerCopy(optimizer, sizes, chosen, kept)
        if type(optimizer) in EXACT:  # only its hooks are tried
            self.optimizer_copy.optimizer = _carry_hooks(self.optimizer_copy.optimizer)
        numbered = [p for group in optimizer.param_groups for p in group["params"]]
        held = {id(p) for group in self.optimizer_copy.optimizer.param_groups for p in group["params"]}
        self.owners = [(n, p) for n, p in enumerate(numbered) if id(self.optimizer_copy.stand_in(p)) in held]
        self._starts = [self.optimizer_copy.stand_in(p).detach().clone() for _, p in self.owners]

    def step(self, grads: dict[int, torch.Tensor], scale: float) -> None:
        """Makes one step with this copy's part of the gradients."""
        self._give(grads, scale)

        def closure() -> torch.Tensor:
            self._give(grads, scale)
            return torch.tensor(scale, dtype=torch.float64)

        args = [closure if callable(value) else value for value in self._args]
        kwargs = {key: closure if callable(value) else value for key, value in self._kwargs.items()}
        with trial.on():
            step: Callable[..., Any] = self.optimizer_copy.optimizer.step
            step(*args, **kwargs)

    def _give(self, grads: dict[int, torch.Tensor], scale: float) -> None:
        for index, parameter in self.owners:
            stand_in = self.optimizer_copy.stand_in(parameter)
            grad = self.optimizer_copy.part(grads[index], kind_of(parameter))
            stand_in.grad = grad + 0.01 * scale * stand_in.detach().tanh()  # a closure may ask at another point

    def clash(self, whole: "TrialRun", *, is_last: bool) -> tuple[str, Kind | None] | None:
        """Returns the name of something that differs from the copy on whole tensors, or None."""
        for _, parameter in self.owners:
            kind = kind_of(parameter)
            mine, truth = self.optimizer_copy.stand_in(parameter), whole.optimizer_copy.stand_in(parameter)
            names: dict[str, tuple[Any, Any]] = {"parameter": (mine, truth)}
            if is_last:
                left, right = self._state(mine), whole._state(truth)
                names |= {f"state{name}": (left.get(name), right.get(name)) for name in {**left, **right}}
            for name, (one, other) in names.items():
                if isinstance(other, torch.Tensor) and other.shape == truth.shape:
                    other = self.optimizer_copy.part(other.detach(), kind)
                if not _is_same(one, other):
                    return name, kind
        if is_last:
            groups = zip(
                self.optimizer_copy.optimizer.param_groups, whole.optimizer_copy.optimizer.param_groups, strict=True
            )
            for own, its in groups:
                for name, value in own.items():
                    if isinstance(value, Real | torch.Tensor) and not _is_same(value, its.get(name)):
                        return f"option {name}", None
        return None

    def has_moved(self) -> bool:
        """Returns whether something has changed, and all to finite numbers."""
        now = [self.optimizer_copy.stand_in(p).detach() for _, p in self.owners]
        is_same = all(torch.equal(one, start) for one, start in zip(now, self._starts, strict=True))
        return not is_same and all(bool(one.isfinite().all()) for one in now)

    def _state(self, stand_in: torch.Tensor) -> dict[str, Any]:
        return _leaves("", self.optimizer_copy.optimizer.state.get(stand_in, {}))


def _carry_hooks(exact: Optimizer) -> Optimizer:
    """Returns an elementwise optimizer with the groups and the hooks of another one."""
    carrier = torch.optim.SGD([{"params": group["params"]} for group in exact.param_groups], lr=0.1)
    for name in STEP_HOOKS:
        vars(carrier)[name] = vars(exact)[name]
    for own, group in zip(carrier.param_groups, exact.param_groups, strict=True):
        own.update({key: value for key, value in group.items() if key not in own})
    return carrier


def _leaves(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _leaves(f"{name} {key}", item).items()}
    if isinstance(value, list | tuple | deque):
        return {k: v for index, item in enumerate(value) for k, v in _leaves(f"{name} {index}", item).items()}
    if isinstance(value, Real | torch.Tensor | str | torch.dtype | None):
        return {name: value}
    raise TypeError(f"its state{name} is a {type(value).__name__}, and whether that depends on the cut cannot be seen")


def _is_same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Real | torch.Tensor) and isinstance(other, Real | torch.Tensor)):
        return bool(one == other)
    a, b = torch.as_tensor(one).detach(), torch.as_tensor(other).detach()
    if a.shape != b.shape:
        return False
    if torch.equal(a, b):  # the usual case, and the fastest to see
        return True
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    finite = b[b.isfinite()].abs()
    slack = TOLERANCE * finite.max().item() if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=slack, equal_nan=True)
