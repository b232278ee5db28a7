"""How the state_dict of a network is made of its parameters and buffers, so that a checkpoint can give it back."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypedDict

import torch

from evenly._torch.modules import is_extra_state, set_versions, versions_of
from evenly.comm.nested_state import flatten
from evenly.errors import CheckpointError

Kind = Literal["tensor", "view", "value", "absent"]


class StateForm(TypedDict):
    """The entries of a state_dict, and the versions of the modules.

    An entry has the name of its tensor; or the owner of its memory, the offset, shape and strides there; or its value,
    if it is no tensor of the network; or a text that says why it is not in the checkpoint.
    """

    entries: list[tuple[str, Kind, Any]]
    versions: dict[str, dict[str, Any]] | None


def form_of(
    state: Mapping[str, object], tensors: Mapping[str, torch.Tensor], exchanged: Mapping[str, torch.Tensor]
) -> StateForm:
    """Returns the form of a state_dict: its `tensors` are named, those `exchanged` are averaged by exchanges."""
    names = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}  # of several names the first
    memory = {_memory(tensor): name for name, tensor in reversed(list(tensors.items())) if tensor.numel()}
    entries: list[tuple[str, Kind, Any]] = []
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or is_extra_state(key):
            entries.append((key, *_kept(key, value)))
            continue
        name = names.get(id(value)) or memory.get(_memory(value))
        if name is None:
            entries.append((key, "absent", "state_dict() computes it from others"))
        elif name not in exchanged and (view := _view(value, exchanged)) is not None:
            entries.append((key, "view", view))
        else:
            entries.append((key, "tensor", name))
    versions = versions_of(state)
    return {"entries": entries, "versions": None if versions is None else dict(_plain_versions(versions))}


def state_of(form: StateForm | None, tensors: Mapping[str, torch.Tensor]) -> OrderedDict[str, Any]:
    """Returns the state_dict of this form with these tensors; without a form it has them under their own names."""
    state: OrderedDict[str, Any] = OrderedDict()
    if form is None:
        state.update(tensors)
        return state
    for key, kind, entry in form["entries"]:
        if kind == "absent":
            raise CheckpointError(
                f"the entry {key!r} of a network's state was asked for, but a checkpoint does not have it: {entry}. "
                "Save the weights in the training loop: session.save('model.pt')."
            )
        if kind == "view":
            owner, offset, shape, strides = entry
            if math.prod(shape) > tensors[owner].numel():
                raise ValueError(f"the entry {key[:40]!r} has more elements than {owner!r}, of which it is a part")
            state[key] = tensors[owner].as_strided(shape, strides, offset)
        else:
            state[key] = tensors[entry] if kind == "tensor" else entry
    set_versions(state, form["versions"])
    return state


def _kept(key: str, value: object) -> tuple[Kind, Any]:
    """Returns a value of another kind as a checkpoint keeps it, or why it cannot."""
    try:
        flatten(value, key, {})
    except CheckpointError:
        return "absent", f"it is a {type(value).__qualname__}"
    return "value", value


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Returns what two tensor objects have in common that are one tensor."""
    if tensor.layout != torch.strided:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()


def _view(value: torch.Tensor, owners: Mapping[str, torch.Tensor]) -> tuple[str, int, list[int], list[int]] | None:
    """Returns the first of `owners` in whose memory a tensor lies, the offset there, and its shape and strides."""
    if value.layout != torch.strided or not value.numel():
        return None
    owners = {name: owner for name, owner in owners.items() if value.numel() <= owner.numel()}
    strides = value.stride()
    extent = 1 + sum((length - 1) * stride for length, stride in zip(value.shape, strides, strict=True))
    for name, owner in owners.items():
        if owner.dtype != value.dtype or owner.device != value.device or not owner.is_contiguous():
            continue
        offset, rest = divmod(value.data_ptr() - owner.data_ptr(), owner.element_size())
        if not rest and offset >= 0 and offset + extent <= owner.numel():
            return name, offset, list(value.shape), list(strides)
    return None


def _plain_versions(versions: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the versions of modules; other entries, which hooks may have added, only if they are plain."""
    for prefix, entry in versions.items():
        yield prefix, {k: v for k, v in entry.items() if isinstance(v, str | int | float | bool | None)}
