"""From a name to a schedule of the learning rate, which is stepped once after every step of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evenly.errors import SpecError
from evenly.recipes.optim.catalogue import SCHEDULES, require_known

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Curve = Callable[[int], float]  # from the number of steps made to a factor of the learning rate, or to a momentum
Options = Mapping[str, Any]


def build_schedule(
    name: str, optimizer: Optimizer, *, steps: int, steps_per_epoch: int, **options: object
) -> LRScheduler:
    """Returns the schedule of this name; call its `step()` after every step of the optimizer.

    The optimizer's own learning rate is the highest. After `steps` steps the last value stays. Only the number of
    steps made is kept in `state_dict()`: a run that resumes with other options goes on along the new curve.

    Args:
        name: one of `SCHEDULES`.
        optimizer: whose learning rate is set.
        steps: of the whole run.
        steps_per_epoch: steps in an epoch.
        options: of the schedule, `ScheduleInfo.options`.
    """
    require_known("schedule", name, SCHEDULES)
    for option in options:
        require_known("option", option, SCHEDULES[name].options, of=f"the schedule {name!r}")
    if min(steps, steps_per_epoch) < 1:
        raise SpecError(
            f"the schedule {name!r} was asked for with steps={steps}, steps_per_epoch={steps_per_epoch}. Give at least "
            "1 of each."
        )
    from evenly.recipes.optim.curve import CurveSchedule

    chosen = {**SCHEDULES[name].options, **options}
    factor = _FACTORS[name](steps, steps_per_epoch, chosen)
    momentum = _momentum_cycle(optimizer, steps, chosen) if name == "one-cycle" else None
    return CurveSchedule(optimizer, factor, momentum)


def _constant(steps: int, steps_per_epoch: int, options: Options) -> Curve:
    return lambda step: 1.0


def _steps(steps: int, steps_per_epoch: int, options: Options) -> Curve:
    gamma = _number("step", "gamma", options, low=0.0)
    size = max(1, round(_number("step", "epochs", options, low=0.0) * steps_per_epoch))
    return lambda step: float(gamma ** (step // size))


def _milestones(steps: int, steps_per_epoch: int, options: Options) -> Curve:
    gamma, given = _number("multistep", "gamma", options, low=0.0), options["milestones"]
    if given is None:
        given = (steps / steps_per_epoch / 2, steps / steps_per_epoch * 3 / 4)
    if not isinstance(given, Sequence) or not all(_is_number(epoch) and epoch >= 0 for epoch in given):
        raise SpecError(f"milestones={given!r} were given for 'multistep'. Give epochs, such as [80, 120].")
    milestones = [round(epoch * steps_per_epoch) for epoch in given]
    return lambda step: float(gamma ** sum(step >= milestone for milestone in milestones))


def _warm_cosine(steps: int, steps_per_epoch: int, options: Options) -> Curve:
    warm = max(1, int(steps * _number("cosine", "warmup", options, high=1.0)))
    final = _number("cosine", "final", options, high=1.0)

    def factor(step: int) -> float:
        fallen = 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))
        return min((step + 1) / warm, final + (1 - final) * fallen)

    return factor


def _one_cycle(steps: int, steps_per_epoch: int, options: Options) -> Curve:
    start, final = (_number("one-cycle", key, options, high=1.0) for key in ("start", "final"))
    return _cycle(steps, options, ends=(start, 1.0, final))


def _momentum_cycle(optimizer: Optimizer, steps: int, options: Options) -> Curve | None:
    """Returns the momentum of each step, low where the learning rate is high; None if it stays."""
    from evenly.recipes.optim.curve import has_momentum

    wish, momenta = options["cycle_momentum"], options["momenta"]
    if wish is True and not has_momentum(optimizer):
        raise SpecError(
            f"cycle_momentum was asked of 'one-cycle'; {type(optimizer).__name__} has no momentum, or 0. Leave it out, "
            "or choose an optimizer with momentum."
        )
    if wish is False or not has_momentum(optimizer):
        return None
    if not (isinstance(momenta, Sequence) and len(momenta) == 2 and all(_is_number(m) and 0 < m < 1 for m in momenta)):
        raise SpecError(
            f"momenta={momenta!r} were given for 'one-cycle'. Give two between 0 and 1, such as [0.85, 0.95]."
        )
    return _cycle(steps, options, ends=(momenta[1], momenta[0], momenta[1]))


def _cycle(steps: int, options: Options, *, ends: tuple[float, float, float]) -> Curve:
    """Returns the curve from the first of `ends` over the second, at the peak, to the third at the last step."""
    if options["shape"] not in ("cosine", "linear"):
        raise SpecError(f"shape={options['shape']!r} was given for 'one-cycle'. Give 'cosine' or 'linear'.")
    last = steps - 1
    top = max(0.0, _number("one-cycle", "peak", options, high=1.0) * steps - 1)

    def value(step: int) -> float:
        step = min(step, last)
        if step <= top:
            begin, end, share = ends[0], ends[1], step / top if top else 1.0
        else:
            begin, end, share = ends[1], ends[2], (step - top) / (last - top)
        if options["shape"] == "linear":
            return begin + (end - begin) * share
        return end + (begin - end) / 2 * (1 + math.cos(math.pi * share))

    return value


def _number(schedule: str, key: str, options: Options, *, low: float = 0.0, high: float = math.inf) -> float:
    value = options[key]
    if not (_is_number(value) and low <= value <= high):
        limit = f"{low:g} to {high:g}" if high < math.inf else f"{low:g} up"
        raise SpecError(f"{key}={value!r} was given for the schedule {schedule!r}. Give a number from {limit}.")
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_FACTORS: Mapping[str, Callable[[int, int, Options], Curve]] = {
    "none": _constant,
    "step": _steps,
    "multistep": _milestones,
    "cosine": _warm_cosine,
    "one-cycle": _one_cycle,
}
