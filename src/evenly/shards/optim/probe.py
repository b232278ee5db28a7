"""Tests by trial steps whether an optimizer is exact on parameters that are cut over ranks."""

import random
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evenly._torch.operators import without_torch_function
from evenly._torch.optimizers import OWN_NOTES, SCHEDULER_NOTES, STEP_HOOKS, global_step_hooks
from evenly._torch.patching import SharedPatch
from evenly._torch.tensors import set_class
from evenly.comm import ShardGroup, first_line, last_mark, learning_rate
from evenly.errors import SpecError
from evenly.shards.optim.clipping import widen_clipping
from evenly.shards.optim.copies import (
    SCALER_ATTRIBUTES,
    UncopyableError,
    hooks_of,
    kind_of,
    step_of,
    tensors_within,
)
from evenly.shards.optim.trial_steps import RAMP, RANK_SUMMING, SCALES, describe_difference
from evenly.shards.parts.guard import CutTensors, cut_tensors_of, guard, trial_mode, unguard
from evenly.shards.parts.local_shards import local_shard_of, local_shards_of
from evenly.shards.parts.part_tensors import PartParameter, called_by_us
from evenly.shards.run.rank_check import StepTally, packed_settings, tally_of, tally_of_uncut

SIZES = ((6, 4, 3, 3, 2), (136, 130))  # of the dims: some optimizers treat large tensors differently
STEPS = (30, len(RAMP) + len(SCALES))  # for each size; some optimizers act only every few steps
SWITCH_TYPES = {bool, str, type(None)}
PLAIN_TYPES = (bool, int, float, str, type(None))


def check_elementwise(
    optimizer: Optimizer, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
) -> None:
    """Raises `SpecError` if the optimizer holds cut parameters and would not step as on the full ones.

    Copies of the optimizer, with its options, attributes and hooks, step on small whole tensors and on parts of them,
    with the same gradients. Every element must be equal after the steps, and so must the optimizer's state: tensors of
    the parameter's shape element by element, all else as a whole. `Adafactor` and `Lamb` of this library sum over ranks
    and pass; only their hooks are tried. For an optimizer without hooks, the result is cached by class and options.

    Args:
        optimizer: the optimizer that is about to step.
        args: positional arguments of `step`; a callable is taken for the closure.
        kwargs: keyword arguments of `step`.
    """
    if not any(_cut_parameters(group["params"]) for group in optimizer.param_groups):
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
    """Checks every optimizer of this process when it steps on cut parameters; returns a function that ends this.

    The first caller registers the hooks and replaces torch's clipping by norm; the end of the last one undoes both.
    """
    return _watching.use()


def _begin_watching() -> Callable[[], None]:
    undo = [
        register_optimizer_step_pre_hook(_before_step).remove,
        register_optimizer_step_post_hook(_after_step).remove,
        widen_clipping(),
    ]

    def end() -> None:
        for remove in undo:
            remove()

    return end


_watching = SharedPatch(_begin_watching)
_lock = threading.RLock()
_reasons: dict[tuple[object, ...], str | None] = {}


class _Checked(NamedTuple):
    """The result of an optimizer's last check."""

    parameter_key: tuple[object, ...]
    change_key: tuple[object, ...] | None  # None where no parameter belongs to a cut network or to its original
    cut: CutTensors
    parameters: list[torch.Tensor]  # all, if some are cut; otherwise none
    shard_groups: list[ShardGroup]  # over which its parameters are cut
    tallies: list[StepTally]  # of the networks that are cut over these
    uncut: list[StepTally]  # of cut networks that were made from the network of its parameters
    needs_gradient: list[torch.Tensor]  # all, if some belong to a cut network or to its original


_checked: "weakref.WeakKeyDictionary[Optimizer, _Checked]" = weakref.WeakKeyDictionary()


class _Settings:
    """The plain values of an optimizer and its groups, and what follows from them.

    Most steps use the very same objects, which takes little time to see. Other objects are not kept: they may refer to
    the optimizer, which would then never be freed.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._packed: tuple[bytes, float] | None = None  # for the count of steps, once it is needed
        self._values = _plain_values(optimizer)
        options = [group[name] for group in optimizer.param_groups for name in group.keys() - {"params", "param_names"}]
        self._may_change_in_place = any(isinstance(value, torch.Tensor | list) for value in options)
        self.signs = [_signs(group) for group in optimizer.param_groups], _signs(vars(optimizer))

    def is_current(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer still has the same values."""
        values = _plain_values(optimizer)
        is_same = len(values) == len(self._values) and all(map(is_, values, self._values))
        return is_same and not self._may_change_in_place

    def count_step(self, optimizer: Optimizer, tallies: Sequence[StepTally]) -> None:
        """Counts a step with these settings."""
        if self._packed is None:
            self._packed = packed_settings(optimizer), learning_rate(optimizer)
        for tally in tallies:
            tally.add(*self._packed)


def _plain_values(optimizer: Optimizer) -> list[object]:
    """Returns the numbers, texts and tuples of these; None in the place of everything else."""
    values = [*vars(optimizer).values()]
    for group in optimizer.param_groups:
        values += group.values()
    return [value if type(value) in PLAIN_TYPES or _is_plain_tuple(value) else None for value in values]


def _is_plain_tuple(value: object) -> bool:
    return type(value) is tuple and all(type(item) in PLAIN_TYPES for item in value)


def _settings_now(optimizer: Optimizer) -> _Settings:
    settings = _settings.get(optimizer)
    if settings is None or not settings.is_current(optimizer):
        settings = _settings[optimizer] = _Settings(optimizer)
    return settings


_settings: "weakref.WeakKeyDictionary[Optimizer, _Settings]" = weakref.WeakKeyDictionary()


def _before_step(
    optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    if trial_mode.is_on:
        return None
    checked = _checked.get(optimizer)
    if checked is None or not _is_valid(checked, optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        local_shards = local_shards_of(parameters)
        uncut = list({id(tally): tally for tally in map(tally_of_uncut, parameters) if tally is not None}.values())
        parameter_key = _parameter_key(optimizer)
        change_key = _change_key(optimizer) if local_shards or uncut else None
        check_elementwise(optimizer, args[1:], kwargs)  # the first is the optimizer
        cut = cut_tensors_of(parameters)
        shard_groups = [
            shard_group
            for shard_group in dict.fromkeys(local_shard.shard_group for local_shard in local_shards)
            if shard_group.size > 1
        ]
        checked = _Checked(
            parameter_key=parameter_key,
            change_key=change_key,
            cut=cut,
            parameters=parameters if cut else [],
            shard_groups=shard_groups,
            tallies=[tally_of(shard_group) for shard_group in shard_groups],
            uncut=uncut,
            needs_gradient=parameters if shard_groups or uncut else [],
        )
        with _lock:
            _checked[optimizer] = checked
    closures = [value for value in (*args[1:], *kwargs.values()) if callable(value)]
    if checked.needs_gradient and not closures and all(p.grad is None for p in checked.needs_gradient):
        _refuse_idle_step(optimizer, checked)
    if not checked.parameters:
        return None
    unguard(checked.parameters)  # the optimizer's step was tried
    if not closures:
        return None

    def guarded(value: object) -> object:
        return _guarded_closure(value, checked) if callable(value) else value

    return (optimizer, *map(guarded, args[1:])), {key: guarded(value) for key, value in kwargs.items()}


def _after_step(optimizer: Optimizer, _: object, __: object) -> None:
    checked = None if trial_mode.is_on else _checked.get(optimizer)
    if checked is not None and checked.shard_groups:
        guard(checked.cut)
        _settings_now(optimizer).count_step(optimizer, checked.tallies)


def _refuse_idle_step(optimizer: Optimizer, checked: _Checked) -> None:
    """Raises `SpecError` for a step without gradients, if the cut network was not trained."""
    name = type(optimizer).__name__
    if not checked.shard_groups and any(tally.passes for tally in checked.uncut):
        case = "its parameters are those of a network before evenly.shard cut it, and none has a gradient"
        advice = "Make the optimizer after evenly.shard, over the parameters of the module that it returned."
    elif checked.shard_groups and all(tally.passes == 0 for tally in checked.tallies):
        case = "the cut network of its parameters was not called since the last step, and none has a gradient"
        advice = "Call the module that evenly.shard returned, and backward of its outputs, before each step."
    else:
        return
    error = SpecError(f"{name} was asked for a step, but {case}: nothing would be trained. {advice}")
    for shard_group in checked.shard_groups:
        shard_group.monitor.report(error)
    raise error


def _guarded_closure(closure: Callable[..., object], checked: _Checked) -> Callable[..., object]:
    """Returns the closure, with parameters that are guarded while it runs and plain after it."""

    def run(*args: object, **kwargs: object) -> object:
        guard(checked.cut)
        loss = closure(*args, **kwargs)
        unguard(checked.parameters)
        return loss

    return run


def _is_valid(checked: _Checked, optimizer: Optimizer) -> bool:
    if checked.parameter_key != _parameter_key(optimizer):
        return False
    return checked.change_key is None or checked.change_key == _change_key(optimizer)


def _parameter_key(optimizer: Optimizer) -> tuple[object, ...]:
    """Returns a value that differs if an optimizer got other parameters, or if some parameter was cut meanwhile."""
    return last_mark(), [tuple(map(id, group["params"])) for group in optimizer.param_groups]


def _change_key(optimizer: Optimizer) -> tuple[object, ...]:
    """Returns a value that differs if an optimizer has changed since it was tried; only the signs of numbers count."""
    attributes = vars(optimizer)
    hooks = [tuple(attributes.get(name, {})) for name in STEP_HOOKS]  # their keys: a hook may refer to the optimizer
    global_hooks = [tuple(hooks) for hooks in global_step_hooks()]
    signs = _settings_now(optimizer).signs
    return type(optimizer).step, id(attributes.get("step")), hooks, global_hooks, signs


def _signs(values: dict[str, Any]) -> list[object]:
    """Returns the signs of the numbers, and the values of the switches, of a group or of an optimizer."""
    signs: list[object] = []
    for name, value in values.items():
        kind = type(value)
        if kind is float or kind is int:
            signs.append((value > 0) - (value < 0) if name != "lr" else 0)
        elif kind in SWITCH_TYPES and name not in SCHEDULER_NOTES:
            signs.append((name, value))
    return signs


def _cut_parameters(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [p for p in parameters if (local_shard := local_shard_of(p)) is not None and local_shard.is_cut]


def _foreign_hooks(optimizer: Optimizer) -> list[Callable[..., object]]:
    """Returns the step hooks of this optimizer, and the global ones, that do not belong to this library."""
    everywhere = [hook for hooks in global_step_hooks() for hook in hooks.values()]
    return hooks_of(optimizer) + [hook for hook in everywhere if getattr(hook, "__module__", "") != __name__]


def _reason(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> str | None:
    """Returns why the optimizer cannot step on the cut parameters it holds, or None."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it is not elementwise: its direction comes from dot products of all elements"
    is_changed = step_of(optimizer) is not None or bool(_foreign_hooks(optimizer))
    if type(optimizer) in RANK_SUMMING:
        if not is_changed:
            return None
        if step_of(optimizer) is not None:
            return "its step was replaced by another function, which cannot be tried without the sums over ranks"
    key = None if is_changed or any(map(callable, (*args, *kwargs.values()))) else _cache_key(optimizer)
    if key is None:
        with _lock, _parameters_out_of_reach(optimizer):
            return _trial_reason(optimizer, args, kwargs)
    if key not in _reasons:
        is_torchs = type(optimizer).__module__.startswith("torch.optim")
        with _lock if is_torchs else _parameters_out_of_reach(optimizer):
            _reasons[key] = _trial_reason(optimizer, args, kwargs)
    return _reasons[key]


def _cache_key(optimizer: Optimizer) -> tuple[object, ...] | None:
    """Returns the cache key of an optimizer without hooks; None if it holds more than plain values."""
    parts: list[object] = [type(optimizer), type(optimizer).step]
    tables = [(vars(optimizer), ("param_groups", "state", "defaults", "step", *OWN_NOTES))]
    tables += [
        (group, ("params", "param_names", "lr", "initial_lr", "differentiable")) for group in optimizer.param_groups
    ]
    for values, ignored in tables:
        relevant = {k: v for k, v in values.items() if k not in ignored and not k.endswith("_hooks")}
        if not all(isinstance(leaf, PLAIN_TYPES) for value in relevant.values() for leaf in _flattened(value)):
            return None
        parts.append(repr(sorted(relevant.items())))
        if "params" in values:
            parts.append(tuple(sorted({repr(kind_of(parameter)) for parameter in values["params"]})))
    is_fresh = not any(optimizer.state.values())
    return (*parts, is_fresh) if is_fresh or type(optimizer).__module__.startswith("torch.optim") else None


def _flattened(value: object) -> Iterator[object]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flattened(item)
    else:
        yield value


class _OutOfReachParameter(torch.nn.Parameter):
    """A parameter of the network while a copy of its optimizer is tried: only this library may use it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if not called_by_us(directly=trial_mode.is_on):
            raise UncopyableError(
                "a hook or the step reaches for the network's own parameters instead of those of the optimizer that it "
                "is called with, so that it could not be tried"
            )
        with without_torch_function():
            return func(*args, **(kwargs or {}))


@contextmanager
def _parameters_out_of_reach(optimizer: Optimizer) -> Iterator[None]:
    """Makes the network's parameters raise an error when used, and restores random states, while copies are tried."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    classes = {p: type(p) for p in parameters if type(p) in (torch.nn.Parameter, PartParameter)}
    random_state = random.getstate()
    devices = sorted({p.device.index or 0 for p in classes if p.is_cuda})
    with _lock:
        try:
            for parameter in classes:
                set_class(parameter, _OutOfReachParameter)
            with torch.random.fork_rng(devices=devices):
                yield
        finally:
            for parameter, original_class in classes.items():
                set_class(parameter, original_class)
            random.setstate(random_state)


def _trial_reason(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> str | None:
    representatives = _representatives(optimizer)
    for sizes, steps in zip(SIZES, STEPS, strict=True):
        try:
            difference = describe_difference(optimizer, sizes, steps, representatives, args, kwargs)
        except UncopyableError as error:
            return str(error)
        except Exception as error:
            case = f"{type(error).__name__}: {first_line(error)}"
            return f"it could not be tried out on tensors of {list(sizes)}: {case}"
        if difference is not None:
            return difference
    return None


def _representatives(optimizer: Optimizer) -> list[list[int]] | None:
    """Returns indices of parameters of each group that represent all; None if attributes may refer to single ones."""
    attributes = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "defaults")}
    attributes = {k: v for k, v in attributes.items() if k not in SCALER_ATTRIBUTES}
    if any(isinstance(v, Optimizer) for v in attributes.values()) or next(tensors_within(attributes), None) is not None:
        return None
    representatives, seen_keys = [], set()
    for group in optimizer.param_groups:
        options = repr({k: v for k, v in group.items() if k not in ("params", "param_names", "lr", "initial_lr")})
        indices = []
        for index, parameter in enumerate(group["params"]):
            key = (options, kind_of(parameter))
            if key not in seen_keys:
                seen_keys.add(key)
                indices.append(index)
        representatives.append(indices)
    return representatives
