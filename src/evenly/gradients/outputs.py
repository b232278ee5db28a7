"""The tensors in what a forward has returned, in whatever it is wrapped, and in what it has left in its modules."""

import collections
import dataclasses
import enum
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from evenly._torch.autograd import operation_of

MOST = 10_000  # objects looked into
PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, enum.Enum, type, weakref.ref),
    *(types.ModuleType, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, torch.Size),
)
CONTAINERS = (list, tuple, set, frozenset, collections.deque)
CLOSED = (torch.nn.Module, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
OF_MODULES = frozenset(vars(torch.nn.Module()))
NO_ATTRIBUTES = (list, tuple, set, frozenset, collections.deque, dict, collections.OrderedDict, collections.defaultdict)


class Outputs:
    """What was found in an output: its `tensors`, and the type of the first thing that cannot be looked into."""

    def __init__(self, output: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.unseen = ""
        if isinstance(output, torch.Tensor):  # by far the most frequent
            self.tensors.append(output)
        else:
            self._look_into(output)

    def _look_into(self, output: Any) -> None:
        waiting, seen = [output], {id(output): output}  # keeps objects that are made on the way, and so their ids
        while waiting:
            value = waiting.pop()
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
                continue
            inside = _inside(value)
            if inside is None:
                self.unseen = self.unseen or type(value).__name__
                continue
            for part in inside:
                if id(part) not in seen and not isinstance(part, PLAIN):
                    seen[id(part)] = part
                    waiting.append(part)
            if len(seen) > MOST:
                self.unseen = f"{type(output).__name__} of more than {MOST} objects"
                return


def _inside(value: Any) -> Iterable[Any] | None:
    """Returns what an object holds; None if that cannot be known."""
    if isinstance(value, PLAIN):
        return ()
    if isinstance(value, CLOSED):
        return None
    held: list[Any] | None = None
    if isinstance(value, Mapping):
        held = list(value.values())
    elif isinstance(value, CONTAINERS):
        held = list(value)
    attributes = None if type(value) in NO_ATTRIBUTES else _attributes(value)
    return None if held is None and attributes is None else [*(held or ()), *(attributes or ())]


def _attributes(value: Any) -> list[Any] | None:
    """Returns the attributes of an object without calling its code; None if it has no place for any."""
    names = [slot for base in type(value).__mro__ for slot in _slots(base)]
    if dataclasses.is_dataclass(value):
        names.extend(field.name for field in dataclasses.fields(value))
    has_dict = hasattr(value, "__dict__")
    if not names and not has_dict:
        return None
    found = [getattr(value, name, None) for name in names]
    return [*found, *vars(value).values()] if has_dict else found


def _slots(base: type) -> list[str]:
    slots = base.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    hidden = base.__name__.lstrip("_")
    return [
        f"_{hidden}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]


class KeptTensors:
    """Tensors with a graph that forwards keep as attributes of modules, such as a loss for the balance of experts.

    Modules are searched at the first few forwards, and ever more seldom later; in between only the places are looked at
    where something was found.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self._places: dict[tuple[int, str], tuple[weakref.ref[torch.nn.Module], str]] = {}
        self._forwards = 0

    @property
    def is_due(self) -> bool:
        """Whether the next forward may keep something, or modules are searched after it."""
        return bool(self._places) or self._forwards & (self._forwards + 1) == 0  # the forwards 1, 2, 4, 8 and so on

    def since(self, number: int) -> list[torch.Tensor]:
        """Returns those that were computed after autograd's sequence number was `number`; counts a forward."""
        self._forwards += 1
        module = self._module()
        if module is not None and self._forwards & (self._forwards - 1) == 0:
            self._search(module)
        kept = [vars(owner).get(name) for place, name in self._places.values() if (owner := place()) is not None]
        return [tensor for tensor in Outputs(kept).tensors if _has_graph(tensor) and operation_of(tensor) >= number]

    def skip(self) -> None:
        """Counts a forward that keeps nothing."""
        self._forwards += 1

    def _search(self, module: torch.nn.Module) -> None:
        for part in module.modules():
            for name, value in vars(part).items():
                if name not in OF_MODULES and any(map(_has_graph, Outputs(value).tensors)):
                    self._places[id(part), name] = (weakref.ref(part), name)


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None
