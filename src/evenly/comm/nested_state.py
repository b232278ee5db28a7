"""Nested state -> tensors for safetensors and the rest as JSON, and back; no pickle anywhere."""

from collections.abc import Sequence
from typing import Any

import torch

from evenly.errors import CheckpointError

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]

_PLAIN = (str, int, float, bool, type(None))


def flatten(value: object, prefix: str, tensors: dict[str, torch.Tensor]) -> Json:
    """Returns `value` as JSON; its tensors are put into `tensors` under names that start with `prefix`."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        name = f"{prefix}#{len(tensors)}"  # the number keeps keys with dots apart
        plain = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
        tensors[name] = plain.to("cpu", copy=True).contiguous()  # what is saved later must not change until then
        return {"$complex" if value.is_complex() else "$tensor": name}  # safetensors does not know all complex types
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        items = [flatten(item, f"{prefix}.{number}", tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        pairs: list[Json] = [
            [flatten(key, f"{prefix}.key", tensors), flatten(item, f"{prefix}.{key}", tensors)]
            for key, item in value.items()
        ]
        return {"$dict": pairs}
    raise CheckpointError(
        f"a checkpoint was to hold {prefix}, which is a {_kind(value)}. Plain tensors, numbers, texts, lists, tuples "
        "and dicts can be saved; give the object a state_dict made of these."
    )


def entry_at(value: Any, path: Sequence[str]) -> Any:
    """Returns what `flatten` made of the entry at a path of dict keys; None if it is not there.

    >>> entry_at(flatten({"a": {"b": 3}}, "x", {}), ("a", "b"))
    3
    """
    for key in path:
        pairs = value.get("$dict", []) if isinstance(value, dict) else []
        value = next((item for entry_key, item in pairs if entry_key == key), None)
    return value


def restore(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns the value that `flatten` converted, with its tensors, which are taken out of `tensors`."""
    if isinstance(value, list):
        return [restore(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors.pop(value["$tensor"])
    if "$complex" in value:
        return torch.view_as_complex(tensors.pop(value["$complex"]).clone())  # a file may not be aligned for it
    if "$tuple" in value:
        return tuple(restore(item, tensors) for item in value["$tuple"])
    return {restore(key, tensors): restore(item, tensors) for key, item in value["$dict"]}


def _kind(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__qualname__
    return f"tensor that is {'quantized' if value.is_quantized else str(value.layout).removeprefix('torch.')}"
