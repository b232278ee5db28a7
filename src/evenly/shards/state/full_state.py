"""The full state of a network cut over ranks: put together from the parts, cut again for any split."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenly._torch import pytree
from evenly._torch.modules import copy_versions, is_extra_state
from evenly.errors import CheckpointError, MismatchError, SpecError
from evenly.shards.optim.optimizers import state_placement
from evenly.shards.parts.local_shards import LocalShard, local_shard_of
from evenly.shards.run.sharded import Sharded, sharded_of

State = dict[str, Any]
OF_SCHEDULES = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}  # what these put into groups


def full_state_dict(
    model: Sharded,
    optimizer: Optimizer | None = None,
    *,
    everywhere: bool = True,
    device: torch.device | str | None = None,
) -> State:
    """Returns the state of the whole network as one device would have it; it does not depend on the split.

    `"model"` is the `state_dict()` of the uncut network, `"optimizer"` that of an optimizer over its parameters,
    `"optimizer_class"` the name of its class, `"dropout"` the place in the stream of dropout masks. All ranks call it
    together; a rank without a share of the network gets {}.

    Args:
        model: the network.
        optimizer: an optimizer of `model.parameters()`.
        everywhere: whether every rank gets the state; otherwise only rank 0 of the wire does, and the others get {}.
        device: where the full tensors are to be; by default where this rank has its parts.
    """
    model = sharded_of(model)
    if model._program is None:
        return {}
    parts: State = {"model": _weights(model)}
    if optimizer is not None:
        parts |= {"optimizer": _slots(optimizer), "optimizer_class": type(optimizer).__name__}
    _require_agreement(model, parts)
    model._rank_check.require_same("when their state was collected")
    kept = everywhere or model.shard_group.rank == 0
    known: dict[int, torch.Tensor] = {}

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to(device, copy=True)
        return leaf.whole(known, kept=kept, device=device) if isinstance(leaf, _Part) else leaf

    state: State = pytree.tree_map(whole, parts)
    if not kept:
        return {}
    copy_versions(state["model"], model._network[0].state_dict(), if_missing=True)
    return {**state, "dropout": {"seed": model._dropout_stream.seed, "passes": model._dropout_stream.passes}}


def load_full_state_dict(
    model: Sharded, state: Mapping[str, Any], optimizer: Optimizer | None = None, *, strict: bool = True
) -> None:
    """Puts this rank's parts of a full state into the network and its optimizer, in place.

    Nothing is changed if something does not fit: `CheckpointError` names it.

    Args:
        model: the network, cut in any way.
        state: what `full_state_dict` gave for any split, or the `state_dict()` of the uncut network.
        optimizer: an optimizer of `model.parameters()`, to go on from the state's.
        strict: whether the state must hold exactly the network's parameters and buffers.
    """
    model = sharded_of(model)
    nested = isinstance(state.get("model"), Mapping)
    local = _cut_weights(model, state["model"] if nested else state, strict=strict)
    slots = _cut_slots(model, optimizer, state if nested else {}) if optimizer is not None else None
    try:
        model._network[0].load_state_dict(local, strict=strict)
        if optimizer is not None and slots is not None:
            optimizer.load_state_dict(slots)
    except (RuntimeError, SpecError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"a state was to be loaded into a network cut over {model.shard_group.size} ranks, but torch could not: "
            f"{type(error).__name__}: {error}. Load a state of the same network and optimizer."
        ) from error
    if nested and state.get("dropout"):
        model._dropout_stream.seed, model._dropout_stream.passes = (
            int(state["dropout"]["seed"]),
            int(state["dropout"]["passes"]),
        )


@dataclass(frozen=True)
class _Part:
    """One tensor of a state as this rank holds it; `problem` says why it cannot be put together."""

    label: str
    tensor: torch.Tensor
    placement: LocalShard | None
    problem: str = ""

    def line(self) -> str:
        """Returns what must be the same on all ranks."""
        placement = self.placement
        where = None if placement is None else (placement.shape, placement.dim, placement.segments)
        return f"{self.label} {self.tensor.dtype} {where} {bool(self.problem)}"

    def whole(self, known: dict[int, torch.Tensor], *, kept: bool, device: torch.device | str | None) -> Any:
        """Returns the full tensor, one for all names of a tied one; None where it is not `kept`."""
        if id(self.tensor) in known:
            return known[id(self.tensor)] if kept else None
        full = self.tensor.detach()
        if self.placement is not None and (kept or self.placement.is_cut):
            full = self.placement.full(self.tensor)
        if kept and full.data_ptr() == self.tensor.data_ptr():
            full = full.clone()
        known[id(self.tensor)] = full.to(device) if kept else self.tensor
        return known[id(self.tensor)] if kept else None


def _weights(model: Sharded) -> "OrderedDict[str, Any]":
    parts: OrderedDict[str, Any] = OrderedDict()
    for name, value in model._network[0].state_dict(keep_vars=True).items():
        parts[name] = value
        if isinstance(value, torch.Tensor) and not is_extra_state(name):
            placement = local_shard_of(value)
            lost = "it is not known how it is cut: the tensor was put in place of another after sharding"
            parts[name] = _Part(name, value, placement, "" if placement is not None else lost)
    return parts


def _slots(optimizer: Optimizer) -> State:
    packed = optimizer.state_dict()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {
            key: pytree.tree_map(partial(_slot, optimizer, order[index], key), value) for key, value in held.items()
        }
        if isinstance(index, int)
        else held
        for index, held in packed["state"].items()
    }
    return {**packed, "state": state}


def _slot(optimizer: Optimizer, parameter: torch.Tensor, key: str, value: Any) -> Any:
    """Returns one entry of an optimizer's state, with its place if it is a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    home = local_shard_of(parameter)
    placement = state_placement(optimizer, parameter, key, value)
    label = f"{type(optimizer).__name__}'s {key!r} of {home.name if home is not None else 'a parameter'!r}"
    problem = ""
    if placement is None and home is not None and home.is_cut and value.numel() != 1:
        problem = f"it is {list(value.shape)} for a part of {list(parameter.shape)}, which has no rule"
    return _Part(label, value, placement, problem)


def _require_agreement(model: Sharded, parts: State) -> None:
    """Raises an error on every rank unless all ranks hold parts of the same tensors, in the same order."""
    found = [leaf for leaf in pytree.tree_leaves(parts) if isinstance(leaf, _Part)]
    text = "\n".join(part.line() for part in found)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    pair = torch.tensor([number, ~number], device=_device(model))
    top, low = model.shard_group.sum(pair, name="state", largest=True).wait().tolist()
    if top != ~low:
        raise MismatchError(
            f"a state of {len(found)} tensors was to be put together from {model.shard_group.size} ranks, but they do "
            "not "
            "hold the same tensors: their optimizers have stepped on different parameters, or are different. Use the "
            "same optimizer on all ranks, and let gradients be None on all of them or on none."
        )
    for part in found:
        if part.problem:
            raise CheckpointError(
                f"the full tensor of {part.label} was asked for, but {part.problem}. Move networks before they are "
                "sharded, and use optimizers that treat each element alone, or those of evenly.shards."
            )


def _cut_weights(model: Sharded, weights: Mapping[str, Any], *, strict: bool) -> State:
    held = model._network[0].state_dict(keep_vars=True)
    missing = [name for name in held if name not in weights]
    strange = [name for name in weights if name not in held]
    if strict and (missing or strange):
        lacks = f"the state lacks {_listed(missing)}" if missing else f"the state holds {_listed(strange)} besides"
        raise _misfit(model, lacks, "or give strict=False to load what is in both")
    local: OrderedDict[str, Any] = OrderedDict()
    copy_versions(local, weights)
    for name, tensor in held.items():
        if name not in weights:
            continue
        local[name] = full = weights[name]
        if not isinstance(tensor, torch.Tensor) or is_extra_state(name):
            continue
        placement = local_shard_of(tensor)
        shape = tensor.shape if placement is None else placement.shape
        if not isinstance(full, torch.Tensor) or full.shape != shape:
            there = list(full.shape) if isinstance(full, torch.Tensor) else type(full).__name__
            raise _misfit(model, f"{name!r} is {there} there and {list(shape)} here")
        local[name] = full if placement is None else placement.part(full)
    return local


def _cut_slots(model: Sharded, optimizer: Optimizer, state: Mapping[str, Any]) -> State:
    saved = state.get("optimizer")
    if not isinstance(saved, Mapping) or "param_groups" not in saved:
        raise _misfit(model, "it has no state of an optimizer", "or load without the optimizer")
    own = type(optimizer).__name__
    if state.get("optimizer_class", own) != own:
        raise _misfit(model, f"it has the state of {state['optimizer_class']}, and the optimizer is {own}")
    slots = _by_index(model, optimizer, saved)
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def cut(parameter: torch.Tensor, key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        placement = state_placement(optimizer, parameter, key, parameter)
        if placement is None:
            return value.clone()
        if value.shape == placement.shape:
            return placement.part(value)
        if value.numel() == 1 or not placement.is_cut:
            return value.clone()
        where = f"{own}'s {key!r} of {placement.name!r}"
        raise _misfit(model, f"{where} is {list(value.shape)} there and {list(placement.shape)} here")

    slots["state"] = {
        index: {key: pytree.tree_map(partial(cut, order[index], key), value) for key, value in held.items()}
        if isinstance(index, int)
        else held
        for index, held in slots["state"].items()
    }
    return slots


def _by_index(model: Sharded, optimizer: Optimizer, saved: Mapping[str, Any]) -> State:
    """Returns a saved state in the order of the optimizer's parameters, whether it was by name or by index."""
    groups, own = saved["param_groups"], optimizer.param_groups
    counts, expected = ([len(group["params"]) for group in some] for some in (groups, own))
    if counts != expected:
        raise _misfit(model, f"its optimizer has groups of {counts} parameters, and the one here of {expected}")
    names = parameter_names(model, optimizer)
    state = {str(key): held for key, held in saved.get("state", {}).items()}
    ordered: list[State] = []
    found: dict[int, Any] = {}
    start = 0
    for theirs, ours in zip(groups, own, strict=True):
        _require_same_options(model, optimizer, theirs, ours)
        ids, stop = list(theirs["params"]), start + len(ours["params"])
        if any(isinstance(name, str) for name in ids):
            strange = sorted(set(ids).symmetric_difference(names[start:stop]))
            if strange:
                raise _misfit(model, f"one of the two optimizers has {_listed(strange)} in a group, the other has not")
            ids = names[start:stop]
        ordered.append({**theirs, "params": list(range(start, stop))})
        found |= {start + place: state.pop(str(key)) for place, key in enumerate(ids) if str(key) in state}
        start = stop
    return {**saved, "state": {**found, **state}, "param_groups": ordered}


def _require_same_options(
    model: Sharded, optimizer: Optimizer, theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> None:
    """Raises `CheckpointError` if a group's options are those of another class, not only of another version."""
    strange = [name for name in theirs if name not in ours and name not in OF_SCHEDULES]
    lacking = [name for name in optimizer.defaults if name not in theirs]
    if strange and lacking:
        raise _misfit(
            model,
            f"it has the state of another optimizer than {type(optimizer).__name__}: one with {_listed(strange)} and "
            f"without {_listed(lacking)}",
        )


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Returns the names of the optimizer's parameters, in their order; "" for one that is not the network's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]


def _misfit(model: Sharded, case: str, otherwise: str = "") -> CheckpointError:
    advice = ", ".join(part for part in ("Load a state of the same network and optimizer", otherwise) if part)
    return CheckpointError(
        f"a state was to be loaded into a network cut over {model.shard_group.size} ranks, but {case}. {advice}."
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
