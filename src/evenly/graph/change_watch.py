"""Detects changes of what a network read while it was traced: a quick check at every call, then a list by name."""

from collections import deque
from collections.abc import Iterator, Mapping, Sized
from functools import partial
from operator import getitem, is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from evenly._torch.autograd import version_of
from evenly._torch.modules import HOOKS, TABLES, is_registered
from evenly.graph.reads import ALL_ATTRIBUTES, MODULE_ATTRIBUTES, Reads, is_user_code

PYTHON_VALUES = (int, float, complex, str, bytes, type(None), type(...), type, range, slice)
PLAIN_VALUES = (*PYTHON_VALUES, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
SETTINGS_MODULES = ("types", "argparse", "collections", "builtins", "dataclasses", "configparser")  # of settings types
MAX_DEPTH = 6  # of nested objects
SMALL_BYTES = 4096  # arrays up to this size are compared by content

_MISSING = "missing"


class Change(NamedTuple):
    """A value that a network reads, and that differs from the last snapshot."""

    name: str
    before: object
    now: object


class _Container(Protocol):
    """A dict, list or tuple."""

    def __getitem__(self, key: Any, /) -> object: ...


class ChangeWatch:
    """A snapshot of what a network read, to find out what has changed since.

    Args:
        root: the network.
        reads: what was read while it, or a copy of it, was traced.
    """

    def __init__(self, root: nn.Module, reads: Reads) -> None:
        self._root, self.reads = root, reads
        self._record()

    def is_unchanged(self) -> bool:
        """Whether nothing changed since the last snapshot; quick, and False may be a false alarm."""
        try:
            if not all(map(is_, map(getitem, self._holders, self._keys), self._held_values)):
                return False
        except (KeyError, IndexError):
            return False
        if list(map(len, self._containers)) != self._sizes:
            return False
        for tensor, version in self._tensor_versions:
            if version_of(tensor) != version:
                return False
        for cell, value in self._closure_cells:
            if cell.cell_contents is not value:
                return False
        return all(now == before for now, before in self._content_copies) and all(
            getattr(owner, name, _MISSING) is value for owner, name, value in self._object_attributes
        )

    def changes(self) -> list[Change]:
        """Returns what changed since the last snapshot, and takes a new one."""
        before = self.recorded_values
        self._record()
        names = dict.fromkeys((*before, *self.recorded_values))
        pairs = ((name, before.get(name, _MISSING), self.recorded_values.get(name, _MISSING)) for name in names)
        return [Change(name, was, now) for name, was, now in pairs if not _is_same(was, now)]

    def _record(self) -> None:
        self.recorded_values: dict[str, object] = {}  # by name: plain values, and objects compared by identity
        self._recorded_items: list[tuple[_Container, object, object]] = []  # container, key, value
        self._container_sizes: list[tuple[Sized, int]] = []
        self._tensor_versions: list[tuple[torch.Tensor, int]] = []
        self._closure_cells: list[tuple[CellType, object]] = []
        self._content_copies: list[tuple[object, object]] = []  # container, copy
        self._object_attributes: list[tuple[object, str, object]] = []  # owner, name, value
        self._visited_ids: set[int] = set()
        self._first_labels: dict[int, str] = {}  # the first name of each tensor
        self._registered_ids = {id(x) for x in (*self._root.parameters(), *self._root.buffers())}
        for path, module in list(self._root.named_modules()):
            if not any(path == closed or path.startswith(f"{closed}.") for closed in self.reads.closed_modules):
                self._record_module(path, module)
        for code, module_globals in self.reads.code_globals.items():
            self._record_globals(code.co_names, module_globals)
        self._holders = [holder for holder, _, _ in self._recorded_items]  # separate lists are compared faster
        self._keys = [key for _, key, _ in self._recorded_items]
        self._held_values = [value for _, _, value in self._recorded_items]
        self._containers = [container for container, _ in self._container_sizes]
        self._sizes = [size for _, size in self._container_sizes]

    def _record_module(self, path: str, module: nn.Module) -> None:
        attributes, prefix = vars(module), f"{path}." if path else ""
        for kind in TABLES:
            entries = attributes[kind]
            self._container_sizes.append((entries, len(entries)))
            for name, value in entries.items():
                self._recorded_items.append((entries, name, value))
                self.recorded_values[f"{prefix}{name}"] = (
                    value if isinstance(value, nn.Module) else self._tensor_key(value, f"{prefix}{name}")
                )
        for kind in HOOKS:
            if kind in attributes:
                self._container_sizes.append((attributes[kind], len(attributes[kind])))
                self.recorded_values[f"{prefix}{kind}"] = len(attributes[kind])
        self._container_sizes.append((attributes, len(attributes)))
        self._object_attributes.append((module, "__class__", type(module)))
        names = self.reads.attribute_names.get(path, set())
        if path in self.reads.leaf_modules:  # torch's internal attributes have an underscore
            names = {name for name in attributes if not name.startswith("_") and name not in MODULE_ATTRIBUTES}
            names.add("forward")
        elif ALL_ATTRIBUTES in names:
            names = {name for name in attributes if name not in MODULE_ATTRIBUTES} | (names - {ALL_ATTRIBUTES})
        for name in sorted(names):
            self._record_attribute(module, f"{prefix}{name}", name)

    def _tensor_key(self, tensor: torch.Tensor | None, label: str) -> tuple[str, str] | None:
        """Returns the part of a parameter or buffer that must not change: that it exists, and what it is tied with."""
        return tensor if tensor is None else ("tensor", self._first_labels.setdefault(id(tensor), label))

    def _record_attribute(self, module: nn.Module, label: str, name: str) -> None:
        attributes = vars(module)
        if name in attributes:
            self._record_item(attributes, name, label)
            return
        owner = next((kind for kind in type(module).__mro__ if name in vars(kind)), None)
        if owner is None:
            if not is_registered(module, name):
                self.recorded_values[label] = _MISSING
        elif owner.__module__.split(".")[0] not in ("torch", "builtins"):
            self._record_item(vars(owner), name, label)
        else:
            self.recorded_values[label] = vars(owner)[name]

    def _record_globals(self, names: tuple[str, ...], module_globals: Mapping[str, object]) -> None:
        for name in names:
            value = module_globals.get(name, _MISSING)
            if isinstance(value, ModuleType | type) and is_user_code(
                {"__name__": value.__name__ if isinstance(value, ModuleType) else value.__module__}
            ):
                for other in names:
                    if other in vars(value):
                        self._record_item(vars(value), other, f"{value.__name__}.{other}")
            if name in module_globals and not isinstance(value, ModuleType):
                self._record_item(module_globals, name, f"{module_globals.get('__name__')}.{name}")

    def _record_item(self, holder: _Container, key: object, label: str, depth: int = 0) -> None:
        value = holder[key]
        self._recorded_items.append((holder, key, value))
        self._record_value(value, label, depth)

    def _record_value(self, value: object, label: str, depth: int) -> None:
        """Records a value and what it contains."""
        self.recorded_values[label] = value
        if isinstance(value, PLAIN_VALUES) or id(value) in self._visited_ids or depth > MAX_DEPTH:
            return
        self._visited_ids.add(id(value))
        if isinstance(value, torch.Tensor):
            if id(value) not in self._registered_ids and not value.is_inference():
                self._tensor_versions.append((value, version_of(value)))
                self.recorded_values[label] = (id(value), version_of(value))
        elif isinstance(value, list | tuple | dict):
            self._record_items(value, label, depth)
        elif isinstance(value, set | frozenset | deque | bytearray):
            self._content_copies.append((value, value.copy()))
            self.recorded_values[label] = value.copy()
        elif isinstance(value, FunctionType | MethodType | partial | staticmethod | classmethod | property):
            self._record_function(value, label, depth)
        elif hasattr(value, "tobytes") and getattr(value, "nbytes", SMALL_BYTES + 1) <= SMALL_BYTES:
            self._content_copies.append((_ArrayContent(value), value.tobytes()))
            self.recorded_values[label] = value.tobytes()
        elif not isinstance(value, nn.Module | ModuleType | type):
            self._record_object(value, label, depth)

    def _record_items(
        self, value: list[object] | tuple[object, ...] | dict[object, object], label: str, depth: int
    ) -> None:
        self._container_sizes.append((value, len(value)))
        self.recorded_values[label] = (type(value), len(value))
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            if isinstance(key, PLAIN_VALUES):
                self._record_item(value, key, f"{label}[{key!r}]", depth + 1)

    def _record_function(self, value: object, label: str, depth: int) -> None:
        for name in ("func", "args", "keywords", "__func__", "__defaults__", "__kwdefaults__", "fget"):
            inner = getattr(value, name, None)
            if inner is not None and not isinstance(inner, nn.Module):
                self._record_value(inner, f"{label}.{name}", depth + 1)
        code, closure = getattr(value, "__code__", None), getattr(value, "__closure__", None)
        if code in self.reads.code_globals and closure:
            for name, cell in zip(code.co_freevars, closure, strict=True):
                if name != "__class__" and _is_filled(cell):
                    self._closure_cells.append((cell, cell.cell_contents))
                    self._record_value(cell.cell_contents, f"{label}: {name}", depth + 1)

    def _record_object(self, value: object, label: str, depth: int) -> None:
        kind = type(value)
        if not is_user_code({"__name__": kind.__module__}) and kind.__module__ not in SETTINGS_MODULES:
            return
        attributes = getattr(value, "__dict__", {})
        if attributes:
            self._container_sizes.append((attributes, len(attributes)))
            for name in list(attributes):
                self._record_item(attributes, name, f"{label}.{name}", depth + 1)
        for name in _slot_names(kind):
            inner = getattr(value, name, _MISSING)
            self._object_attributes.append((value, name, inner))
            self._record_value(inner, f"{label}.{name}", depth + 1)
        for name, inner in vars(kind).items():
            if not name.startswith("__") and isinstance(inner, (*PLAIN_VALUES, list, dict, tuple)):
                self._record_item(vars(kind), name, f"{kind.__name__}.{name}", depth + 1)


class _ArrayContent:
    """An array that compares equal to its bytes."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __eq__(self, other: object) -> bool:
        return bool(self._array.tobytes() == other)

    __hash__ = None  # type: ignore[assignment]  # it changes


def _slot_names(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        yield from (name for name in ([names] if isinstance(names, str) else names) if not name.startswith("__"))


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if it is empty
    except ValueError:
        return False
    return True


def _is_same(one: object, other: object) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    plain = isinstance(one, (*PLAIN_VALUES, set, frozenset, deque, bytearray)) or (
        isinstance(one, tuple)
        and isinstance(other, tuple)
        and all(isinstance(x, (*PLAIN_VALUES, tuple)) for x in (*one, *other))
    )
    return plain and bool(one == other)
