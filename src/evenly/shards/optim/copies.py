"""Copies an optimizer, with its hooks, so that the copy steps on small stand-ins for its parameters."""

import copy
import functools
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from evenly._torch.optimizers import STEP_HOOKS, is_scheduler_wrapper
from evenly.shards.optim.optimizers import ParamGroup
from evenly.shards.parts.local_shards import local_shard_of

T = TypeVar("T")

SHARED_TYPES: tuple[type, ...] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    torch.dtype,
    torch.device,
    torch.layout,
    types.ModuleType,
    types.NoneType,
    types.BuiltinFunctionType,
    types.EllipsisType,
    nn.Module,
)  # a copy refers to the same object
SCALER_ATTRIBUTES = ("grad_scale", "found_inf")  # set by a GradScaler for one step
MIN_CUT_SIZE = 3  # indices of a cut dim, at least
LR = 0.1  # large enough to change parameters: a warmup begins with 0


class UncopyableError(Exception):
    """An optimizer holds an object that cannot be copied, or that refers to the network."""


class ParameterKind(NamedTuple):
    """A parameter of `num_dims` dims, cut along `dim`, or whole with None."""

    num_dims: int
    dim: int | None
    is_complex: bool
    device: str


def kind_of(parameter: torch.Tensor) -> ParameterKind:
    """Returns the properties of a parameter that an optimizer may depend on, without its size."""
    local_shard = local_shard_of(parameter)
    device = parameter.device.type if parameter.device.type in ("cpu", "cuda") else "cpu"  # with float64
    dim = None if local_shard is None else local_shard.dim
    return ParameterKind(parameter.ndim, dim, parameter.is_complex(), device)


def is_ours(hook: object) -> bool:
    """Returns whether a hook belongs to this library; such hooks do not change how an optimizer steps."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "evenly"


def step_of(optimizer: Optimizer) -> object:
    """Returns the `step` that was set on the instance, or None; a scheduler's counting wrapper is ignored."""
    step: object = vars(optimizer).get("step")
    return None if is_scheduler_wrapper(step, optimizer) else step


def hooks_of(optimizer: Optimizer) -> list[Callable[..., object]]:
    """Returns the step hooks that do not belong to this library."""
    return [hook for name in STEP_HOOKS for hook in vars(optimizer).get(name, {}).values() if not is_ours(hook)]


class OptimizerCopy:
    """Copies an optimizer over stand-ins: small float64 tensors, whole or only the `part_indices` of the cut dims.

    Everything that the optimizer refers to is copied with it: options, attributes, other optimizers, closures and
    module globals of hooks. Tensors in the shape of a parameter become tensors in the shape of its stand-in.

    Args:
        optimizer: the optimizer to copy.
        sizes: sizes of the first dims of a stand-in; further dims have size 1.
        part_indices: maps the size of the cut dim to the indices that a part holds; None for whole tensors.
        representatives: indices of the parameters of each group that are copied; None for all.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sizes: Sequence[int],
        part_indices: Callable[[int], torch.Tensor] | None,
        representatives: Sequence[Sequence[int]] | None,
    ) -> None:
        self._sizes = sizes
        self._part_indices = part_indices
        self._representatives = representatives
        self._root = optimizer
        self._memo: dict[int, Any] = {}  # id of an original -> the copy that takes its place
        self._originals: list[object] = []  # keeps the ids in the memo valid
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(self._parameters):
            start = draw(kind_of(parameter), sizes, seed=number)
            stand_in = nn.Parameter(self.part(start, kind_of(parameter)), requires_grad=parameter.requires_grad)
            self._remember(parameter, stand_in)
        self.optimizer: Optimizer = self._optimizer(optimizer)

    def stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the small tensor that stands for a parameter."""
        stand_in: torch.Tensor = self._memo[id(parameter)]
        return stand_in

    def part(self, full: torch.Tensor, kind: ParameterKind) -> torch.Tensor:
        """Returns this copy's part of a full stand-in."""
        if self._part_indices is None or kind.dim is None:
            return full.clone()
        return full.index_select(kind.dim, self._part_indices(full.shape[kind.dim]).to(full.device))

    def _remember(self, value: object, copied: T) -> T:
        self._originals.append(value)
        self._memo[id(value)] = copied
        return copied

    def _copy(self, value: T) -> T:
        copied: T
        if id(value) in self._memo:
            copied = self._memo[id(value)]
            return copied
        if isinstance(value, SHARED_TYPES) and not isinstance(value, torch.Tensor):
            return value  # a module keeps its real parameters, which raise an error when touched
        for kind, copier in self._copiers():
            if isinstance(value, kind):
                copied = copier(value)
                return copied
        return self._object(value)

    def _copiers(self) -> Iterator[tuple[type | tuple[type, ...], Callable[[Any], Any]]]:
        yield torch.Tensor, self._tensor
        yield Optimizer, self._optimizer
        yield dict, self._dict
        yield (list, set, deque), self._collection
        yield (tuple, frozenset), self._tuple
        yield types.FunctionType, self._function
        yield types.MethodType, lambda value: types.MethodType(self._copy(value.__func__), self._copy(value.__self__))
        yield functools.partial, self._partial
        yield weakref.ref, self._reference

    def _optimizer(self, value: Optimizer) -> Optimizer:
        copied: Optimizer = self._remember(value, object.__new__(type(value)))
        for name, attribute in vars(value).items():
            if name in STEP_HOOKS:
                hooks = {number: self._copy(hook) for number, hook in attribute.items() if not is_ours(hook)}
                vars(copied)[name] = OrderedDict(hooks)
            elif name.endswith("_hooks") and isinstance(attribute, OrderedDict):
                vars(copied)[name] = OrderedDict()  # hooks of state_dict()
            elif name == "param_groups" and isinstance(attribute, list):
                vars(copied)[name] = self._groups(attribute, self._representatives if value is self._root else None)
            elif name == "state" and isinstance(attribute, dict):
                vars(copied)[name] = self._state(attribute)
            elif name not in SCALER_ATTRIBUTES and (name != "step" or step_of(value) is not None):
                vars(copied)[name] = self._copy(attribute)
        if "differentiable" in vars(copied).get("defaults", {}):
            copied.defaults["differentiable"] = False  # no autograd in the step
        return copied

    def _groups(self, groups: list[ParamGroup], representatives: Sequence[Sequence[int]] | None) -> list[ParamGroup]:
        copied_groups = []
        for number, group in enumerate(groups):
            if id(group) in self._memo:  # shared by a wrapper and the optimizer inside it
                copied_groups.append(self._memo[id(group)])
                continue
            numbers = range(len(group["params"])) if representatives is None else representatives[number]
            if not numbers:
                continue
            group_copy = {k: self._copy(v) for k, v in group.items() if k not in ("params", "param_names")}
            for name in ("params", "param_names"):
                if name in group:
                    group_copy[name] = [self._copy(group[name][index]) for index in numbers]
            if isinstance(group_copy.get("lr"), Real | torch.Tensor):
                group_copy["lr"] = LR
            if "differentiable" in group_copy:
                group_copy["differentiable"] = False
            copied_groups.append(self._remember(group, group_copy))
        return copied_groups

    def _state(self, state: dict[object, object]) -> dict[object, object]:
        if id(state) in self._memo:  # shared by a wrapper and the optimizer inside it
            existing: dict[object, object] = self._memo[id(state)]
            return existing
        copied = self._remember(state, copy.copy(state))
        copied.clear()
        for owner, entries in state.items():
            if isinstance(owner, torch.Tensor):
                for tensor in tensors_within(entries):
                    if tensor.shape == owner.shape and tensor.numel() > 1 and id(tensor) not in self._memo:
                        self._remember(tensor, self._like(tensor, kind_of(owner)))
            copied[self._copy(owner)] = self._copy(entries)
        return copied

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        kinds = {kind_of(owner) for owner in self._parameters if owner.shape == value.shape}
        if value.ndim == 0 or not kinds:
            copied = value.detach().clone()
            return self._remember(value, copied)
        if len(kinds) > 1:
            raise UncopyableError(
                f"it holds a tensor of {list(value.shape)} that may belong to parameters that are cut differently"
            )
        return self._remember(value, self._like(value, kinds.pop()))

    def _like(self, value: torch.Tensor, kind: ParameterKind) -> torch.Tensor:
        """Returns a tensor in the shape of a stand-in, filled with the repeated numbers of `value`."""
        full = draw(kind, self._sizes, seed=0)
        numbers = value.detach().flatten()[: full.numel()].to(full.device)
        numbers = numbers.to(full.dtype) if numbers.is_floating_point() or numbers.is_complex() else numbers
        if numbers.numel() == 0:
            numbers = numbers.new_zeros(1)
        times = -(-full.numel() // numbers.numel())
        return self.part(numbers.repeat(times)[: full.numel()].view(full.shape), kind)

    def _dict(self, value: dict[object, object]) -> dict[object, object]:
        copied = self._remember(value, copy.copy(value))
        copied.clear()
        for key, item in value.items():
            copied[self._copy(key)] = self._copy(item)
        return copied

    def _collection(
        self, value: list[object] | set[object] | deque[object]
    ) -> list[object] | set[object] | deque[object]:
        copied = self._remember(value, copy.copy(value))
        copied.clear()
        for item in value:
            copied.append(self._copy(item)) if hasattr(copied, "append") else copied.add(self._copy(item))
        return copied

    def _tuple(self, value: tuple[object, ...] | frozenset[object]) -> object:
        items = [self._copy(item) for item in value]
        rebuild: Callable[..., object] = type(value)
        return self._remember(value, rebuild(*items) if hasattr(value, "_fields") else rebuild(items))

    def _partial(self, value: "functools.partial[object]") -> "functools.partial[object]":
        return functools.partial(self._copy(value.func), *self._copy(value.args), **self._copy(value.keywords))

    def _reference(self, value: "weakref.ref[object]") -> "weakref.ref[object]":
        target = value()
        return value if target is None else weakref.ref(self._copy(target))

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """Returns the function with copies of its closure, defaults and the module globals that it reads."""
        is_library = str(value.__globals__.get("__name__", "")).partition(".")[0] in ("torch", "evenly")
        if is_library and value.__closure__ is None:
            return value
        names = () if is_library else [name for name in _names(value.__code__) if name in value.__globals__]
        module_globals = value.__globals__ if is_library else dict(value.__globals__)
        cells = None if value.__closure__ is None else tuple(types.CellType() for _ in value.__closure__)
        copied = types.FunctionType(value.__code__, module_globals, value.__name__, None, cells)
        self._remember(value, copied)
        for name in names:
            if not isinstance(value.__globals__[name], types.FunctionType):
                module_globals[name] = self._copy(value.__globals__[name])
        for new_cell, cell in zip(cells or (), value.__closure__ or (), strict=True):
            try:
                new_cell.cell_contents = self._copy(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
        copied.__defaults__ = self._copy(value.__defaults__)
        copied.__kwdefaults__ = self._copy(value.__kwdefaults__)
        copied.__dict__.update({key: self._copy(attribute) for key, attribute in vars(value).items()})
        return copied

    def _object(self, value: T) -> T:
        needs_deepcopy = hasattr(type(value), "__deepcopy__") or not hasattr(value, "__dict__")
        try:
            if needs_deepcopy or isinstance(value, random.Random):
                return self._remember(value, copy.deepcopy(value))
            copied = self._remember(value, object.__new__(type(value)))
        except UncopyableError:
            raise
        except Exception as error:
            raise UncopyableError(f"it holds a {type(value).__name__}, which cannot be copied") from error
        vars(copied).update({name: self._copy(attribute) for name, attribute in vars(value).items()})
        return copied


def draw(kind: ParameterKind, sizes: Sequence[int], *, seed: int) -> torch.Tensor:
    """Returns a tensor of random numbers for a parameter of this kind."""
    shape = [*sizes, *[1] * kind.num_dims][: kind.num_dims]
    if kind.dim is not None:
        shape[kind.dim] = max(shape[kind.dim], MIN_CUT_SIZE)
    dtype = torch.complex128 if kind.is_complex else torch.float64
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(kind.device)


def tensors_within(value: object) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_within(item)
    elif isinstance(value, list | tuple | set | deque):
        for item in value:
            yield from tensors_within(item)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the global names that a function and its inner functions look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
