"""Finds the tensors in the outputs of a forward, nested in any objects, and those kept in its modules."""

import collections
import dataclasses
import enum
import types
import weakref
from collections.abc import Iterable, Mapping

import torch

from evenly._torch.autograd import sequence_number_of

MOST = 10_000  # objects searched
PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, enum.Enum, type, weakref.ref),
    *(types.ModuleType, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, torch.Size),
)
CONTAINERS = (list, tuple, set, frozenset, collections.deque)
CLOSED = (torch.nn.Module, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
OF_MODULES = frozenset(vars(torch.nn.Module()))
LIBRARY = f"{__name__.split('.', maxsplit=1)[0]}."  # its objects keep no outputs, and those of a cut network are large
NO_ATTRIBUTES = (list, tuple, set, frozenset, collections.deque, dict, collections.OrderedDict, collections.defaultdict)


class Outputs:
    """The `tensors` in an output, and the type of the first object that cannot be searched (`unseen`)."""

    def __init__(self, output: object) -> None:
        self.tensors: list[torch.Tensor] = []
        self.unseen = ""
        if isinstance(output, torch.Tensor):  # the usual case
            self.tensors.append(output)
        else:
            self._search_output(output)

    def _search_output(self, output: object) -> None:
        waiting = [output]
        visited = {id(output): output}  # holds references, so that ids stay unique
        while waiting:
            value = waiting.pop()
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
                continue
            inside = _contents(value)
            if inside is None:
                self.unseen = self.unseen or type(value).__name__
                continue
            for part in inside:
                if id(part) not in visited and not isinstance(part, PLAIN):
                    visited[id(part)] = part
                    waiting.append(part)
            if len(visited) > MOST:
                self.unseen = f"{type(output).__name__} of more than {MOST} objects"
                return


def _contents(value: object) -> Iterable[object] | None:
    """Returns the values inside an object; None if they cannot be accessed."""
    if isinstance(value, PLAIN):
        return ()
    if isinstance(value, CLOSED):
        return None
    items: list[object] | None = None
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, CONTAINERS):
        items = list(value)
    attributes = None if type(value) in NO_ATTRIBUTES else _attributes(value)
    return None if items is None and attributes is None else [*(items or ()), *(attributes or ())]


def _attributes(value: object) -> list[object] | None:
    """Returns the attributes of an object without calling its code; None if it cannot have any."""
    names = [slot for base in type(value).__mro__ for slot in _slots(base)]
    if dataclasses.is_dataclass(value):
        names.extend(field.name for field in dataclasses.fields(value))
    has_dict = hasattr(value, "__dict__")
    if not names and not has_dict:
        return None
    values = [getattr(value, name, None) for name in names]
    return [*values, *vars(value).values()] if has_dict else values


def _slots(base: type) -> list[str]:
    slots = base.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    class_name = base.__name__.lstrip("_")
    return [
        f"_{class_name}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]


class KeptTensors:
    """Tensors with a graph that forwards keep as attributes of modules, such as a loss for the balance of experts.

    All modules are searched after the forwards 1, 2, 4, 8 and so on; in between only the attributes that held such a
    tensor before.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self._kept_in: dict[tuple[int, str], tuple[weakref.ref[torch.nn.Module], str]] = {}  # modules, attributes
        self._forwards = 0

    @property
    def is_due(self) -> bool:
        """Whether the next forward may keep something, or modules are searched after it."""
        return bool(self._kept_in) or self._forwards & (self._forwards + 1) == 0  # the forwards 1, 2, 4, 8 and so on

    def since(self, number: int) -> list[torch.Tensor]:
        """Returns those computed since autograd's sequence number `number`; counts a forward."""
        self._forwards += 1
        module = self._module()
        if module is not None and self._forwards & (self._forwards - 1) == 0:
            self._search(module)
        attributes = [
            vars(owner).get(name) for reference, name in self._kept_in.values() if (owner := reference()) is not None
        ]
        tensors = Outputs(attributes).tensors
        return [tensor for tensor in tensors if _has_graph(tensor) and sequence_number_of(tensor) >= number]

    def skip(self) -> None:
        """Counts a forward that keeps nothing."""
        self._forwards += 1

    def _search(self, module: torch.nn.Module) -> None:
        for part in module.modules():
            for name, value in vars(part).items():
                if name in OF_MODULES or type(value).__module__.startswith(LIBRARY):
                    continue
                if any(map(_has_graph, Outputs(value).tensors)):
                    self._kept_in[id(part), name] = (weakref.ref(part), name)


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None
