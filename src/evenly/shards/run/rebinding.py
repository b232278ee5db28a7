"""Replaces or collects references into a tree of modules, in methods, functions and containers."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

DEPTH = 4  # of nested containers and closures
Copies = Mapping[int, nn.Module | torch.Tensor]  # the copy of each module and tensor, by its identity


def rebound(value: object, copies: Copies, depth: int = 0) -> Any:
    """Returns a value with modules and tensors of a tree replaced by their copies; the same if it holds none.

    The result has the type of the value.

    Args:
        value: an attribute of a module.
        copies: the copy of each module and tensor, by its identity.
        depth: the number of values that it is nested in.
    """
    if isinstance(value, nn.Module | torch.Tensor):
        return copies.get(id(value), value)
    if depth > DEPTH:
        return value
    if isinstance(value, MethodType):
        owner = rebound(value.__self__, copies, depth + 1)
        function = rebound(value.__func__, copies, depth + 1)
        same = owner is value.__self__ and function is value.__func__
        return value if same else MethodType(function, owner)
    if isinstance(value, FunctionType):
        return _function(value, copies, depth)
    if isinstance(value, partial):
        parts = rebound([value.func, value.args, value.keywords], copies, depth + 1)
        same = all(a is b for a, b in zip(parts, (value.func, value.args, value.keywords), strict=True))
        return value if same else partial(parts[0], *parts[1], **parts[2])
    if isinstance(value, list | tuple | set) and type(value) in (list, tuple, set):  # no subclasses
        items = [rebound(item, copies, depth + 1) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if type(value) is dict:
        replaced = {key: rebound(item, copies, depth + 1) for key, item in value.items()}
        return value if all(replaced[key] is value[key] for key in replaced) else replaced
    return value


def reachable(value: object, visited: set[int] | None = None, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yields the tensors that a module can reach: its own, and those of objects that it refers to."""
    visited = set() if visited is None else visited
    if id(value) in visited or depth > 2 * DEPTH:
        return
    visited.add(id(value))
    inner: Iterable[object] = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        inner = [x for name, x in vars(value).items()]
    elif isinstance(value, MethodType):
        inner = (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        inner = [_cell_contents(cell) for cell in value.__closure__ or ()]
    elif isinstance(value, partial):
        inner = (value.func, value.args, value.keywords)
    elif isinstance(value, list | tuple | set):
        inner = value
    elif isinstance(value, dict):
        inner = value.values()
    elif type(value).__module__ != "builtins":
        inner = list(getattr(value, "__dict__", {}).values())
    for item in inner:
        yield from reachable(item, visited, depth + 1)


def _function(value: FunctionType, copies: Copies, depth: int) -> FunctionType:
    cells = value.__closure__ or ()
    contents = [_cell_contents(cell) for cell in cells]
    replaced = [rebound(inner, copies, depth + 1) for inner in contents]
    if all(a is b for a, b in zip(replaced, contents, strict=True)):
        return value
    closure = tuple(cell if a is b else CellType(a) for a, b, cell in zip(replaced, contents, cells, strict=True))
    copy = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
    copy.__kwdefaults__, copy.__dict__ = value.__kwdefaults__, dict(vars(value))
    return copy


def _cell_contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
