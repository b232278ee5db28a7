"""A copy of an optimizer, with its hooks, that steps on small tensors in place of the parameters it holds."""

import copy
import functools
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from evenly._torch.optimizers import STEP_HOOKS, only_counts
from evenly.shards.parts.local_shards import local_shard_of

Indices = torch.Tensor | None
ATOMS: tuple[type, ...] = (
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
)
ATOMS += (types.NoneType, types.BuiltinFunctionType, types.EllipsisType, nn.Module)
LEFT_OUT = ("grad_scale", "found_inf")  # a GradScaler sets them for one step
LEAST = 3  # indices of a cut dim
LR = 0.1  # one that is felt: a warmup begins with 0


class UncopiedError(Exception):
    """An optimizer holds something of which no copy can be made, or that leads back to the network."""


class Kind(NamedTuple):
    """A parameter of `num_dims` dims, cut along `dim`, or whole with None."""

    num_dims: int
    dim: int | None
    is_complex: bool
    device: str


def kind_of(parameter: torch.Tensor) -> Kind:
    """Returns what an optimizer sees of a parameter, but for its size."""
    placement = local_shard_of(parameter)
    device = parameter.device.type if parameter.device.type in ("cpu", "cuda") else "cpu"  # with float64
    dim = None if placement is None else placement.dim
    return Kind(parameter.ndim, dim, parameter.is_complex(), device)


def is_ours(hook: Any) -> bool:
    """Returns whether a hook is this library's: those only count, check and average."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "evenly"


def step_of(optimizer: Optimizer) -> Any:
    """Returns the `step` that was put on the object itself, or None; what a scheduler puts there only counts."""
    step: Any = vars(optimizer).get("step")
    return None if only_counts(step, optimizer) else step


def hooks_of(optimizer: Optimizer) -> list[Any]:
    """Returns the step hooks that are not this library's."""
    return [hook for name in STEP_HOOKS for hook in vars(optimizer).get(name, {}).values() if not is_ours(hook)]


class OptimizerCopy:
    """Copies an optimizer over stand-ins: float64 tensors of small `sizes`, or the `chosen` indices of the cut dims.

    Everything that the optimizer refers to is copied with it: options, attributes, other optimizers, what hooks close
    over or find in their module. Tensors in the shape of a parameter become tensors in the shape of its stand-in.

    Args:
        optimizer: what to copy; its groups may be cut short with `kept`.
        sizes: of the dims of a stand-in, further ones 1.
        chosen: which indices of the cut dim a part holds, by the size of the dim; None for whole tensors.
        kept: numbers of the parameters of each group that the copy gets; None for all.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sizes: Sequence[int],
        chosen: Callable[[int], torch.Tensor] | None,
        kept: Sequence[Sequence[int]] | None,
    ) -> None:
        self._sizes = sizes
        self._chosen = chosen
        self._kept = kept
        self._root = optimizer
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []  # what the memo knows by its id
        self._owners = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(self._owners):
            start = draw(kind_of(parameter), sizes, seed=number)
            stand_in = nn.Parameter(self.part(start, kind_of(parameter)), requires_grad=parameter.requires_grad)
            self._keep(parameter, stand_in)
        self.optimizer: Optimizer = self._optimizer(optimizer)

    def stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the small tensor in place of a parameter."""
        found: torch.Tensor = self._memo[id(parameter)]
        return found

    def part(self, full: torch.Tensor, kind: Kind) -> torch.Tensor:
        """Returns what this copy holds of a full stand-in."""
        if self._chosen is None or kind.dim is None:
            return full.clone()
        return full.index_select(kind.dim, self._chosen(full.shape[kind.dim]).to(full.device))

    def _keep(self, value: Any, made: Any) -> Any:
        self._alive.append(value)
        self._memo[id(value)] = made
        return made

    def _copy(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, ATOMS) and not isinstance(value, torch.Tensor):
            return value  # a module keeps its parameters: whoever touches those is found out
        for kind, act in self._ways():
            if isinstance(value, kind):
                return act(value)
        return self._object(value)

    def _ways(self) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
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
        made: Optimizer = self._keep(value, object.__new__(type(value)))
        for name, held in vars(value).items():
            if name in STEP_HOOKS:
                kept = {number: self._copy(hook) for number, hook in held.items() if not is_ours(hook)}
                vars(made)[name] = OrderedDict(kept)
            elif name.endswith("_hooks") and isinstance(held, OrderedDict):
                vars(made)[name] = OrderedDict()  # of state_dict()
            elif name == "param_groups" and isinstance(held, list):
                vars(made)[name] = self._groups(held, self._kept if value is self._root else None)
            elif name == "state" and isinstance(held, dict):
                vars(made)[name] = self._state(held)
            elif name not in LEFT_OUT and (name != "step" or step_of(value) is not None):
                vars(made)[name] = self._copy(held)
        if "differentiable" in vars(made).get("defaults", {}):
            made.defaults["differentiable"] = False  # no autograd in the step
        return made

    def _groups(self, groups: list[Any], kept: Sequence[Sequence[int]] | None) -> list[Any]:
        made = []
        for number, group in enumerate(groups):
            if id(group) in self._memo:  # of a wrapper and what it wraps
                made.append(self._memo[id(group)])
                continue
            numbers = range(len(group["params"])) if kept is None else kept[number]
            if not numbers:
                continue
            copied = {k: self._copy(v) for k, v in group.items() if k not in ("params", "param_names")}
            for name in ("params", "param_names"):
                if name in group:
                    copied[name] = [self._copy(group[name][index]) for index in numbers]
            if isinstance(copied.get("lr"), Real | torch.Tensor):
                copied["lr"] = LR
            if "differentiable" in copied:
                copied["differentiable"] = False
            made.append(self._keep(group, copied))
        return made

    def _state(self, state: dict[Any, Any]) -> dict[Any, Any]:
        if id(state) in self._memo:  # of a wrapper and what it wraps
            shared: dict[Any, Any] = self._memo[id(state)]
            return shared
        made: dict[Any, Any] = self._keep(state, copy.copy(state))
        made.clear()
        for owner, entries in state.items():
            if isinstance(owner, torch.Tensor):
                for tensor in tensors_within(entries):
                    if tensor.shape == owner.shape and tensor.numel() > 1 and id(tensor) not in self._memo:
                        self._keep(tensor, self._like(tensor, kind_of(owner)))
            made[self._copy(owner)] = self._copy(entries)
        return made

    def _tensor(self, value: torch.Tensor) -> Any:
        alike = {kind_of(owner) for owner in self._owners if owner.shape == value.shape}
        if value.ndim == 0 or not alike:
            made = value.detach().clone()
            return self._keep(value, made)
        if len(alike) > 1:
            raise UncopiedError(
                f"it holds a tensor of {list(value.shape)} that may belong to parameters cut in different ways"
            )
        return self._keep(value, self._like(value, alike.pop()))

    def _like(self, value: torch.Tensor, kind: Kind) -> torch.Tensor:
        """Returns a tensor in the shape of a stand-in, with the numbers of `value` over and over."""
        full = draw(kind, self._sizes, seed=0)
        numbers = value.detach().flatten()[: full.numel()].to(full.device)
        numbers = numbers.to(full.dtype) if numbers.is_floating_point() or numbers.is_complex() else numbers
        if numbers.numel() == 0:
            numbers = numbers.new_zeros(1)
        times = -(-full.numel() // numbers.numel())
        return self.part(numbers.repeat(times)[: full.numel()].view(full.shape), kind)

    def _dict(self, value: dict[Any, Any]) -> Any:
        made = self._keep(value, copy.copy(value))
        made.clear()
        for key, held in value.items():
            made[self._copy(key)] = self._copy(held)
        return made

    def _collection(self, value: Any) -> Any:
        made = self._keep(value, copy.copy(value))
        made.clear()
        for held in value:
            made.append(self._copy(held)) if hasattr(made, "append") else made.add(self._copy(held))
        return made

    def _tuple(self, value: Any) -> Any:
        held = [self._copy(one) for one in value]
        return self._keep(value, type(value)(*held) if hasattr(value, "_fields") else type(value)(held))

    def _partial(self, value: "functools.partial[Any]") -> Any:
        return functools.partial(self._copy(value.func), *self._copy(value.args), **self._copy(value.keywords))

    def _reference(self, value: "weakref.ref[Any]") -> Any:
        target = value()
        return value if target is None else weakref.ref(self._copy(target))

    def _function(self, value: types.FunctionType) -> Any:
        """Returns the function with its own copies of what it closes over and of the data of its module."""
        is_library = str(value.__globals__.get("__name__", "")).partition(".")[0] in ("torch", "evenly")
        if is_library and value.__closure__ is None:
            return value
        names = () if is_library else [name for name in _names(value.__code__) if name in value.__globals__]
        world = value.__globals__ if is_library else dict(value.__globals__)
        cells = None if value.__closure__ is None else tuple(types.CellType() for _ in value.__closure__)
        made = types.FunctionType(value.__code__, world, value.__name__, None, cells)
        self._keep(value, made)
        for name in names:
            if not isinstance(value.__globals__[name], types.FunctionType):
                world[name] = self._copy(value.__globals__[name])
        for own, cell in zip(cells or (), value.__closure__ or (), strict=True):
            try:
                own.cell_contents = self._copy(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
        made.__defaults__ = self._copy(value.__defaults__)
        made.__kwdefaults__ = self._copy(value.__kwdefaults__)
        made.__dict__.update({key: self._copy(held) for key, held in vars(value).items()})
        return made

    def _object(self, value: Any) -> Any:
        own = hasattr(type(value), "__deepcopy__") or not hasattr(value, "__dict__")
        try:
            if own or isinstance(value, random.Random):
                return self._keep(value, copy.deepcopy(value))
            made = self._keep(value, object.__new__(type(value)))
        except UncopiedError:
            raise
        except Exception as error:
            raise UncopiedError(f"it holds a {type(value).__name__}, which cannot be copied") from error
        vars(made).update({name: self._copy(held) for name, held in vars(value).items()})
        return made


def draw(kind: Kind, sizes: Sequence[int], *, seed: int) -> torch.Tensor:
    """Returns a tensor of random numbers for a parameter of this kind."""
    shape = [*sizes, *[1] * kind.num_dims][: kind.num_dims]
    if kind.dim is not None:
        shape[kind.dim] = max(shape[kind.dim], LEAST)
    dtype = torch.complex128 if kind.is_complex else torch.float64
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(kind.device)


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for held in value.values():
            yield from tensors_within(held)
    elif isinstance(value, list | tuple | set | deque):
        for held in value:
            yield from tensors_within(held)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names that a function, and those written inside it, look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
