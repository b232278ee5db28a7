"""Finds out by trying whether an optimizer is exact on parameters that are cut over ranks."""

import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evenly._torch.operators import without_torch_function
from evenly._torch.optimizers import OWN_NOTES, SCHEDULER_NOTES, STEP_HOOKS, step_hooks_of_all
from evenly._torch.patching import SharedPatch
from evenly._torch.tensors import set_class
from evenly.comm import ShardGroup, first_line
from evenly.errors import SpecError
from evenly.shards.optim.clipping import widen_clipping
from evenly.shards.optim.copies import (
    LEFT_OUT,
    UncopiedError,
    hooks_of,
    kind_of,
    step_of,
    tensors_within,
)
from evenly.shards.optim.trial_steps import EXACT, RAMP, SCALES, compare
from evenly.shards.parts.guard import Apart, apart, guard, trial, unguard
from evenly.shards.parts.local_shards import local_shard_of, local_shards_of
from evenly.shards.parts.part_tensors import PartParameter, called_by_us
from evenly.shards.run.rank_check import StepTally, tally_of, tally_of_uncut

SIZES = ((6, 4, 3, 3, 2), (136, 130))  # of the dims: some treat large tensors in another way
STEPS = (30, len(RAMP) + len(SCALES))  # for each size; some act every few steps only
SWITCHES = {bool, str, type(None)}
PLAIN = (bool, int, float, str, type(None))


def check_elementwise(optimizer: Optimizer, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> None:
    """Raises `SpecError` if the optimizer holds cut parameters and would not step as on the full ones.

    Copies of the optimizer, with its options, attributes and hooks, step on small whole tensors and on parts of them,
    with the same gradients. Every element must come out the same, and so must what the optimizer remembers: tensors of
    the parameter's shape element by element, all else as it is. `Adafactor` and `Lamb` of this library sum over ranks
    and pass; their hooks are tried. Of an optimizer without hooks, what is found is kept for its class and options.

    Args:
        optimizer: what is to step.
        args: what `step` is called with; a function among it is taken for the closure.
        kwargs: the same, by name.
    """
    if not any(_cut(group["params"]) for group in optimizer.param_groups):
        return
    reason = _reason(optimizer, tuple(args), dict(kwargs or {}))
    if reason is not None:
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        hooks = [getattr(hook, "__qualname__", type(hook).__name__) for hook in _foreign_hooks(optimizer)]
        shown = f"{name} with the step hooks {', '.join(hooks)}" if hooks else name
        advice = " and take out or change the hooks," if hooks else ""
        raise SpecError(
            f"{shown} was asked to step on parameters that are cut over ranks, but {reason}. Use an optimizer that "
            f"treats each element alone, such as torch.optim.AdamW or SGD,{advice} or one that sums over ranks: "
            "evenly.shards.Adafactor or evenly.shards.Lamb. Clip gradients with evenly.shards.clip_grad_norm_."
        )


def watch_optimizers() -> Callable[[], None]:
    """Has every optimizer of this process checked when it steps on cut parameters; returns what ends it.

    The hooks, and torch's clipping by norm, are changed once for all who watch, and back when the last of them ends.
    """
    return _watching.use()


def _begin_watching() -> Callable[[], None]:
    undo = [
        register_optimizer_step_pre_hook(_before_step).remove,
        register_optimizer_step_post_hook(_after_step).remove,
        widen_clipping(),
    ]

    def end() -> None:
        for act in undo:
            act()

    return end


_watching = SharedPatch(_begin_watching)
_lock = threading.RLock()
_reasons: dict[tuple[Any, ...], str | None] = {}


class _Checked(NamedTuple):
    """How an optimizer looked when it was checked last, and its parameters: those cut, all if some are cut, ..."""

    look: tuple[Any, ...]
    cut: Apart
    held: list[torch.Tensor]
    shard_groups: list[ShardGroup]  # that its parameters are spread over
    uncut: list[StepTally]  # of the networks that were made from those of its parameters
    needs_gradient: list[torch.Tensor]  # all, if some are of a cut network, or of one that it was made from


_checked: "weakref.WeakKeyDictionary[Optimizer, _Checked]" = weakref.WeakKeyDictionary()


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if trial.is_on:
        return None
    look = _look(optimizer)
    known = _checked.get(optimizer)
    if known is None or known.look != look:
        check_elementwise(optimizer, args[1:], kwargs)  # the first is the optimizer
        held = [p for group in optimizer.param_groups for p in group["params"]]
        cut = apart(held)
        shard_groups = [
            shard_group
            for shard_group in dict.fromkeys(own.shard_group for own in local_shards_of(held))
            if shard_group.size > 1
        ]
        uncut = list({id(tally): tally for tally in map(tally_of_uncut, held) if tally is not None}.values())
        known = _Checked(look, cut, held if cut else [], shard_groups, uncut, held if shard_groups or uncut else [])
        with _lock:
            _checked[optimizer] = known
    closures = [value for value in (*args[1:], *kwargs.values()) if callable(value)]
    if known.needs_gradient and not closures and all(p.grad is None for p in known.needs_gradient):
        _refuse_idle_step(optimizer, known)
    if not known.held:
        return None
    unguard(known.held)  # what the optimizer does with them was tried
    if not closures:
        return None

    def led(value: Any) -> Any:
        return _guarding(value, known) if callable(value) else value

    return (optimizer, *map(led, args[1:])), {key: led(value) for key, value in kwargs.items()}


def _after_step(optimizer: Optimizer, _: Any, __: Any) -> None:
    known = None if trial.is_on else _checked.get(optimizer)
    if known is not None and known.shard_groups:
        guard(known.cut)
        for shard_group in known.shard_groups:
            tally_of(shard_group).add(optimizer)


def _refuse_idle_step(optimizer: Optimizer, known: _Checked) -> None:
    """Raises `SpecError` where a step without gradients comes from training another network than the cut one."""
    name = type(optimizer).__name__
    if not known.shard_groups and any(tally.passes for tally in known.uncut):
        case = "its parameters are those of a network before evenly.shard cut it, and none has a gradient"
        advice = "Make the optimizer after evenly.shard, over the parameters of the module that it returned."
    elif known.shard_groups and all(tally_of(shard_group).passes == 0 for shard_group in known.shard_groups):
        case = "the cut network of its parameters was not called since the last step, and none has a gradient"
        advice = "Call the module that evenly.shard returned, and backward of its outputs, before each step."
    else:
        return
    error = SpecError(f"{name} was asked for a step, but {case}: nothing would be trained. {advice}")
    for shard_group in known.shard_groups:
        shard_group.monitor.report(error)
    raise error


def _guarding(closure: Callable[..., Any], known: _Checked) -> Callable[..., Any]:
    """Returns the closure, with parameters that are guarded inside and plain again for the optimizer."""

    def run(*args: Any, **kwargs: Any) -> Any:
        guard(known.cut)
        loss = closure(*args, **kwargs)
        unguard(known.held)
        return loss

    return run


def _look(optimizer: Optimizer) -> tuple[Any, ...]:
    """Returns what tells that an optimizer has changed since it was tried; numbers count by their sign alone."""
    held = vars(optimizer)
    hooks = [tuple(held.get(name, {})) for name in STEP_HOOKS]  # their numbers: hooks themselves may hold the optimizer
    world = [tuple(hooks) for hooks in step_hooks_of_all()]
    groups = [(tuple(map(id, group["params"])), _signs(group)) for group in optimizer.param_groups]
    return type(optimizer).step, id(held.get("step")), hooks, world, groups, _signs(held)


def _signs(values: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for name, value in values.items():
        kind = type(value)
        if kind is float or kind is int:
            found.append((value > 0) - (value < 0) if name != "lr" else 0)
        elif kind in SWITCHES and name not in SCHEDULER_NOTES:
            found.append((name, value))
    return found


def _cut(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [p for p in parameters if (placement := local_shard_of(p)) is not None and placement.is_cut]


def _foreign_hooks(optimizer: Optimizer) -> list[Any]:
    """Returns the step hooks of this optimizer and of all that are not this library's."""
    everywhere = [hook for hooks in step_hooks_of_all() for hook in hooks.values()]
    return hooks_of(optimizer) + [hook for hook in everywhere if getattr(hook, "__module__", "") != __name__]


def _reason(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Returns why the optimizer is not to be used on the cut parameters it holds, or None."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it is not elementwise: its direction comes from dot products of all elements"
    is_changed = step_of(optimizer) is not None or bool(_foreign_hooks(optimizer))
    if type(optimizer) in EXACT:
        if not is_changed:
            return None
        if step_of(optimizer) is not None:
            return "its step was replaced by another function, which cannot be tried apart from the sums over ranks"
    key = None if is_changed or any(map(callable, (*args, *kwargs.values()))) else _key(optimizer)
    if key is None:
        with _lock, _left_alone(optimizer):
            return _try(optimizer, args, kwargs)
    if key not in _reasons:
        is_torchs = type(optimizer).__module__.startswith("torch.optim")
        with _lock if is_torchs else _left_alone(optimizer):
            _reasons[key] = _try(optimizer, args, kwargs)
    return _reasons[key]


def _key(optimizer: Optimizer) -> tuple[Any, ...] | None:
    """Returns all that decides about an optimizer without hooks; None if it holds more than plain values."""
    parts: list[Any] = [type(optimizer), type(optimizer).step]
    bags = [(vars(optimizer), ("param_groups", "state", "defaults", "step", *OWN_NOTES))]
    bags += [
        (group, ("params", "param_names", "lr", "initial_lr", "differentiable")) for group in optimizer.param_groups
    ]
    for values, ignored in bags:
        kept = {k: v for k, v in values.items() if k not in ignored and not k.endswith("_hooks")}
        if not all(isinstance(leaf, PLAIN) for value in kept.values() for leaf in _flat(value)):
            return None
        parts.append(repr(sorted(kept.items())))
        if "params" in values:
            parts.append(tuple(sorted({repr(kind_of(parameter)) for parameter in values["params"]})))
    is_fresh = not any(optimizer.state.values())
    return (*parts, is_fresh) if is_fresh or type(optimizer).__module__.startswith("torch.optim") else None


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for held in value:
            yield from _flat(held)
    else:
        yield value


class _OutOfReachParameter(torch.nn.Parameter):
    """A parameter of the network while a copy of its optimizer is tried: only this library may touch it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not called_by_us(directly=trial.is_on):
            raise UncopiedError(
                "a hook or the step reaches for the network's own parameters instead of those of the optimizer that it "
                "is given, so that it could not be tried"
            )
        with without_torch_function():
            return func(*args, **(kwargs or {}))


@contextmanager
def _left_alone(optimizer: Optimizer) -> Iterator[None]:
    """Keeps the network's parameters out of reach and random numbers as they are while copies are tried."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    kinds = {p: type(p) for p in held if type(p) in (torch.nn.Parameter, PartParameter)}
    chance = random.getstate()
    devices = sorted({p.device.index or 0 for p in kinds if p.is_cuda})
    with _lock:
        try:
            for parameter in kinds:
                set_class(parameter, _OutOfReachParameter)
            with torch.random.fork_rng(devices=devices):
                yield
        finally:
            for parameter, kind in kinds.items():
                set_class(parameter, kind)
            random.setstate(chance)


def _try(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    kept = _representatives(optimizer)
    for sizes, steps in zip(SIZES, STEPS, strict=True):
        try:
            clash = compare(optimizer, sizes, steps, kept, args, kwargs)
        except UncopiedError as error:
            return str(error)
        except Exception as error:
            case = f"{type(error).__name__}: {first_line(error)}"
            return f"it could not be tried out on tensors of {list(sizes)}: {case}"
        if clash is not None:
            return clash
    return None


def _representatives(optimizer: Optimizer) -> list[list[int]] | None:
    """Returns which parameters of each group stand for all; None for all, where attributes may be of single ones."""
    attributes = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "defaults")}
    attributes = {k: v for k, v in attributes.items() if k not in LEFT_OUT}
    if any(isinstance(v, Optimizer) for v in attributes.values()) or next(tensors_within(attributes), None) is not None:
        return None
    kept, seen = [], set()
    for group in optimizer.param_groups:
        options = repr({k: v for k, v in group.items() if k not in ("params", "param_names", "lr", "initial_lr")})
        numbers = []
        for number, parameter in enumerate(group["params"]):
            key = (options, kind_of(parameter))
            if key not in seen:
                seen.add(key)
                numbers.append(number)
        kept.append(numbers)
    return kept
