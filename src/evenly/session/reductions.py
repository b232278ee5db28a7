"""Values of all ranks: gathered, averaged by samples, and numbers for the record."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save

from evenly.comm import ObjectGatherer
from evenly.comm.nested_state import Json, flatten, restore
from evenly.errors import CheckpointError, SpecError

Number = float | torch.Tensor


def gather_values(gatherer: ObjectGatherer, value: object, what: str) -> list[Any]:
    """Returns the value of every rank, in their order; tensors may have unequal shapes, and lie on the CPU."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        form = flatten(value, "value", tensors)
    except CheckpointError:
        raise SpecError(
            f"gather was given a value with something that cannot be sent: {_kinds(value)}. Give tensors, numbers, "
            "texts, and lists, tuples and dicts of these."
        ) from None
    rows: list[tuple[Json, bool]] = gatherer.gather((form, bool(tensors)), what)
    if not any(has_tensors for _, has_tensors in rows):
        return [restore(form, {}) for form, _ in rows]
    contents = gatherer.gather_bytes(save(tensors) if tensors else b"", f"the tensors of {what}")
    return [restore(form, load(content) if content else {}) for (form, _), content in zip(rows, contents, strict=True)]


def mean_value(gatherer: ObjectGatherer, value: Number, count: float | None) -> Any:
    """Returns sum_r count_r value_r / sum_r count_r: a number, or a tensor where a tensor with dims was given."""
    weight = 1.0 if count is None else _number(count, "count")
    if not 0 <= weight < math.inf:
        raise SpecError(f"mean was given count={count}. Give the samples behind the value: a number of at least 0.")
    own = (
        value.detach()
        if isinstance(value, torch.Tensor)
        else torch.tensor(_number(value, "value"), dtype=torch.float64)
    )
    dtype = own.dtype if own.is_floating_point() or own.is_complex() else torch.float32
    exact = own.to("cpu", torch.complex128 if own.is_complex() else torch.float64)
    rows = gather_values(gatherer, (weight, exact), "a mean over ranks")
    counted = [(row_weight, row) for row_weight, row in rows if row_weight > 0]  # others may hold NaN
    total = sum(row_weight for row_weight, _ in counted)
    if not counted:
        raise SpecError("mean was called, but count is 0 on every rank. Give the samples behind each rank's value.")
    if len({row.shape for _, row in counted}) > 1:
        shapes = ", ".join(str(list(row.shape)) for _, row in counted)
        raise SpecError(f"mean was given tensors of unequal shapes: {shapes}. Give values of one shape, or use gather.")
    mean = torch.stack([row * (row_weight / total) for row_weight, row in counted]).sum(0)
    return mean.item() if mean.ndim == 0 else mean.to(dtype)


def numbers_of(values: Mapping[str, Number | None]) -> dict[str, float | None]:
    """Returns values as numbers; tensors have one element."""
    return {name: None if value is None else _number(value, name) for name, value in values.items()}


def _number(value: object, name: str) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise SpecError(
            f"{name}=... was given a tensor of shape {list(value.shape)}, but it is one number. Give its mean or sum."
        )
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError):
        raise SpecError(f"{name}={value!r} was given, but it is one number. Give a number or such a tensor.") from None


def _kinds(value: object) -> str:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return ", ".join(sorted({type(item).__name__ for item in items}))
