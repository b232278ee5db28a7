"""The full state of a network cut over ranks: gathered from the parts, and cut again for any split."""

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

StateDict = dict[str, Any]  # nested, as torch's `state_dict()` returns it
SavedState = Mapping[str, Any]  # such a state to be loaded: of another split, or of the uncut network
SCHEDULER_OPTIONS = {
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
}  # options that schedulers add to groups


def full_state_dict(
    model: Sharded,
    optimizer: Optimizer | None = None,
    *,
    everywhere: bool = True,
    device: torch.device | str | None = None,
) -> StateDict:
    """Returns the state of the whole network as on one device; it does not depend on the split.

    `"model"` is the `state_dict()` of the uncut network, `"optimizer"` that of an optimizer over its parameters,
    `"optimizer_class"` the name of its class, `"dropout"` the position in the stream of dropout masks. All ranks call
    it together; a rank without a share of the network gets {}.

    Args:
        model: the network.
        optimizer: an optimizer of `model.parameters()`.
        everywhere: whether every rank gets the state; otherwise only rank 0 of the shard group, and the others {}.
        device: the device of the full tensors; by default that of this rank's parts.
    """
    model = sharded_of(model)
    if model._program is None:
        return {}
    parts: StateDict = {"model": _model_parts(model)}
    if optimizer is not None:
        parts |= {"optimizer": _optimizer_parts(optimizer), "optimizer_class": type(optimizer).__name__}
    _require_agreement(model, parts)
    model._rank_check.require_same("when their state was collected")
    is_receiver = everywhere or model.shard_group.rank == 0
    full_tensors: dict[int, torch.Tensor] = {}

    def full_leaf(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to(device, copy=True)
        return leaf.full(full_tensors, is_receiver=is_receiver, device=device) if isinstance(leaf, _Part) else leaf

    state: StateDict = pytree.tree_map(full_leaf, parts)
    if not is_receiver:
        return {}
    copy_versions(state["model"], model._network[0].state_dict(), if_missing=True)
    return {**state, "dropout": {"seed": model._dropout_stream.seed, "passes": model._dropout_stream.passes}}


def load_full_state_dict(
    model: Sharded, state: SavedState, optimizer: Optimizer | None = None, *, strict: bool = True
) -> None:
    """Loads this rank's parts of a full state into the network and its optimizer, in place.

    If an entry does not fit, nothing is changed, and `CheckpointError` names the entry.

    Args:
        model: the network, cut in any way.
        state: a result of `full_state_dict` for any split, or the `state_dict()` of the uncut network.
        optimizer: an optimizer of `model.parameters()`, which gets the state's optimizer state.
        strict: whether the state must hold exactly the network's parameters and buffers.
    """
    model = sharded_of(model)
    nested = isinstance(state.get("model"), Mapping)
    model_state = _cut_model_state(model, state["model"] if nested else state, strict=strict)
    optimizer_state = _cut_optimizer_state(model, optimizer, state if nested else {}) if optimizer is not None else None
    dropout = _dropout_state(state.get("dropout")) if nested else None
    try:
        model._network[0].load_state_dict(model_state, strict=strict)
        if optimizer is not None and optimizer_state is not None:
            optimizer.load_state_dict(optimizer_state)
    except (RuntimeError, SpecError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"a state was to be loaded into a network cut over {model.shard_group.size} ranks, but torch could not: "
            f"{type(error).__name__}: {error}. Load a state of the same network and optimizer."
        ) from error
    if dropout is not None:
        model._dropout_stream.seed, model._dropout_stream.passes = dropout


def _dropout_state(entry: object) -> tuple[int, int] | None:
    """Returns the seed and the passes of a state's dropout, if it has one."""
    if not entry:
        return None
    seed, passes = (entry.get("seed"), entry.get("passes")) if isinstance(entry, Mapping) else (None, None)
    if not isinstance(seed, int) or not isinstance(passes, int):
        raise CheckpointError(
            f"a state was to be loaded whose entry 'dropout' is {entry!r}, not a dict with two whole numbers, 'seed' "
            "and 'passes'. Nothing was changed. Load a result of full_state_dict."
        )
    return seed, passes


@dataclass(frozen=True)
class _Part:
    """One tensor of a state on this rank; `problem` says why the full tensor cannot be gathered."""

    label: str
    tensor: torch.Tensor
    local_shard: LocalShard | None
    problem: str = ""

    def line(self) -> str:
        """Returns a description that must be equal on all ranks."""
        local_shard = self.local_shard
        where = None if local_shard is None else (local_shard.shape, local_shard.dim, local_shard.segments)
        return f"{self.label} {self.tensor.dtype} {where} {bool(self.problem)}"

    def full(
        self, full_tensors: dict[int, torch.Tensor], *, is_receiver: bool, device: torch.device | str | None
    ) -> torch.Tensor | None:
        """Returns the full tensor, the same for all names of a tied one; None unless `is_receiver`."""
        if id(self.tensor) in full_tensors:
            return full_tensors[id(self.tensor)] if is_receiver else None
        full = self.tensor.detach()
        if self.local_shard is not None and (is_receiver or self.local_shard.is_cut):
            full = self.local_shard.full(self.tensor)
        if is_receiver and full.data_ptr() == self.tensor.data_ptr():
            full = full.clone()
        full_tensors[id(self.tensor)] = full.to(device) if is_receiver else self.tensor
        return full_tensors[id(self.tensor)] if is_receiver else None


def _model_parts(model: Sharded) -> OrderedDict[str, object]:
    parts: OrderedDict[str, object] = OrderedDict()
    for name, value in model._network[0].state_dict(keep_vars=True).items():
        parts[name] = value
        if isinstance(value, torch.Tensor) and not is_extra_state(name):
            local_shard = local_shard_of(value)
            problem = "its cut is unknown: the tensor replaced another after sharding"
            parts[name] = _Part(name, value, local_shard, "" if local_shard is not None else problem)
    return parts


def _optimizer_parts(optimizer: Optimizer) -> StateDict:
    packed = optimizer.state_dict()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {
            key: pytree.tree_map(partial(_slot_part, optimizer, order[index], key), value)
            for key, value in entries.items()
        }
        if isinstance(index, int)
        else entries
        for index, entries in packed["state"].items()
    }
    return {**packed, "state": state}


def _slot_part(optimizer: Optimizer, parameter: torch.Tensor, key: str, value: object) -> object:
    """Returns one entry of an optimizer's state, with its local shard if it is a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    parameter_shard = local_shard_of(parameter)
    local_shard = state_placement(optimizer, parameter, key, value)
    owner = parameter_shard.name if parameter_shard is not None else "a parameter"
    label = f"{type(optimizer).__name__}'s {key!r} of {owner!r}"
    problem = ""
    if local_shard is None and parameter_shard is not None and parameter_shard.is_cut and value.numel() != 1:
        problem = f"it is {list(value.shape)} for a part of {list(parameter.shape)}, and no rule says how it is cut"
    return _Part(label, value, local_shard, problem)


def _require_agreement(model: Sharded, parts: StateDict) -> None:
    """Raises an error on every rank unless all ranks hold parts of the same tensors, in the same order."""
    leaves = [leaf for leaf in pytree.tree_leaves(parts) if isinstance(leaf, _Part)]
    text = "\n".join(part.line() for part in leaves)
    checksum = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    pair = torch.tensor([checksum, ~checksum], device=_device(model))
    top, low = model.shard_group.sum(pair, name="state", largest=True).wait().tolist()
    if top != ~low:
        raise MismatchError(
            f"the full state of {len(leaves)} tensors was requested from {model.shard_group.size} ranks, but they hold "
            "different tensors: their optimizers differ, or have stepped on different parameters. Use the same "
            "optimizer on all ranks, with gradients that are None on all of them or on none."
        )
    for part in leaves:
        if part.problem:
            raise CheckpointError(
                f"the full tensor of {part.label} was requested, but {part.problem}. Move a network to its device "
                "before sharding it, and use elementwise optimizers, or those of evenly.shards."
            )


def _cut_model_state(model: Sharded, weights: Mapping[str, object], *, strict: bool) -> StateDict:
    local_state = model._network[0].state_dict(keep_vars=True)
    missing = [name for name in local_state if name not in weights]
    unexpected = [name for name in weights if name not in local_state]
    if strict and (missing or unexpected):
        lacks = f"the state lacks {_listed(missing)}" if missing else f"the state has {_listed(unexpected)} in addition"
        raise _load_error(model, lacks, "or give strict=False to load what is in both")
    parts: OrderedDict[str, object] = OrderedDict()
    copy_versions(parts, weights)
    for name, tensor in local_state.items():
        if name not in weights:
            continue
        parts[name] = full = weights[name]
        if not isinstance(tensor, torch.Tensor) or is_extra_state(name):
            continue
        local_shard = local_shard_of(tensor)
        shape = tensor.shape if local_shard is None else local_shard.shape
        if not isinstance(full, torch.Tensor) or full.shape != shape:
            there = list(full.shape) if isinstance(full, torch.Tensor) else type(full).__name__
            raise _load_error(model, f"{name!r} is {there} there and {list(shape)} here")
        parts[name] = full if local_shard is None else local_shard.part(full)
    return parts


def _cut_optimizer_state(model: Sharded, optimizer: Optimizer, state: SavedState) -> StateDict:
    saved = state.get("optimizer")
    if not isinstance(saved, Mapping) or "param_groups" not in saved:
        raise _load_error(model, "it has no state of an optimizer", "or load without the optimizer")
    class_name = type(optimizer).__name__
    if state.get("optimizer_class", class_name) != class_name:
        raise _load_error(model, f"it has the state of {state['optimizer_class']}, and the optimizer is {class_name}")
    optimizer_state = _by_index(model, optimizer, saved)
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def cut(parameter: torch.Tensor, key: str, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        local_shard = state_placement(optimizer, parameter, key, parameter)
        if local_shard is None:
            return value.clone()
        if value.shape == local_shard.shape:
            return local_shard.part(value)
        if value.numel() == 1 or not local_shard.is_cut:
            return value.clone()
        where = f"{class_name}'s {key!r} of {local_shard.name!r}"
        raise _load_error(model, f"{where} is {list(value.shape)} there and {list(local_shard.shape)} here")

    optimizer_state["state"] = {
        index: {key: pytree.tree_map(partial(cut, order[index], key), value) for key, value in entries.items()}
        if isinstance(index, int)
        else entries
        for index, entries in optimizer_state["state"].items()
    }
    return optimizer_state


def _by_index(model: Sharded, optimizer: Optimizer, saved: SavedState) -> StateDict:
    """Returns a saved state, keyed by name or by index, in the order of the optimizer's parameters."""
    groups, own_groups = saved["param_groups"], optimizer.param_groups
    counts, expected = ([len(group["params"]) for group in some] for some in (groups, own_groups))
    if counts != expected:
        raise _load_error(model, f"its optimizer has groups of {counts} parameters, and the one here of {expected}")
    names = parameter_names(model, optimizer)
    state = {str(key): entries for key, entries in saved.get("state", {}).items()}
    ordered: list[StateDict] = []
    state_by_index: dict[int, object] = {}
    start = 0
    for theirs, ours in zip(groups, own_groups, strict=True):
        _require_same_options(model, optimizer, theirs, ours)
        ids, stop = list(theirs["params"]), start + len(ours["params"])
        if any(isinstance(name, str) for name in ids):
            unmatched = sorted(set(ids).symmetric_difference(names[start:stop]))
            if unmatched:
                raise _load_error(
                    model, f"one of the two optimizers has {_listed(unmatched)} in a group, the other has not"
                )
            ids = names[start:stop]
        ordered.append({**theirs, "params": list(range(start, stop))})
        state_by_index |= {start + offset: state.pop(str(key)) for offset, key in enumerate(ids) if str(key) in state}
        start = stop
    return {**saved, "state": {**state_by_index, **state}, "param_groups": ordered}


def _require_same_options(
    model: Sharded, optimizer: Optimizer, theirs: Mapping[str, object], ours: Mapping[str, object]
) -> None:
    """Raises `CheckpointError` if a group's options belong to another class, not only to another version."""
    unexpected = [name for name in theirs if name not in ours and name not in SCHEDULER_OPTIONS]
    missing = [name for name in optimizer.defaults if name not in theirs]
    if unexpected and missing:
        raise _load_error(
            model,
            f"it has the state of another optimizer than {type(optimizer).__name__}: one with {_listed(unexpected)} "
            f"and without {_listed(missing)}",
        )


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Returns the names of the optimizer's parameters, in their order; "" for one that is not the network's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]


def _load_error(model: Sharded, case: str, alternative: str = "") -> CheckpointError:
    advice = ", ".join(part for part in ("Load a state of the same network and optimizer", alternative) if part)
    return CheckpointError(
        f"a state was to be loaded into a network cut over {model.shard_group.size} ranks, but {case}. {advice}."
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
