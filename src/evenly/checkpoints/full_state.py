"""The state of a trained model in full tensors, whether its network is cut over ranks or not."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from evenly._torch.dtensor import is_dtensor, placed_like
from evenly._torch.modules import set_versions, versions_of
from evenly.batches import Feed
from evenly.checkpoints.optimizer_fit import load_optimizer
from evenly.checkpoints.state_form import StateForm, form_of
from evenly.checkpoints.states import FullState, LocalState, NodeState
from evenly.comm import LocalShard, local_shard_of, local_tensor
from evenly.errors import CheckpointError
from evenly.exchange import ExchangeState, PayloadEntryState, PendingState
from evenly.nodes import Synchronized
from evenly.shards import Sharded, full_state_dict, load_full_state_dict

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedModel:
    """What trains together: a synchronized module, its optimizer, its batches."""

    name: str
    model: Synchronized
    optimizer: torch.optim.Optimizer
    feed: Feed | None

    def times(self, ranks: int) -> float:
        """Returns the samples of all ranks over those of this rank."""
        return ranks if self.feed is None else self.feed.times

    def close(self, *, is_interrupted: bool = False) -> None:
        """Closes the process groups of the module; nodes of an interrupted run may hold different parameters."""
        self.model.close(may_differ=is_interrupted)
        if isinstance(self.model.module, Sharded):
            self.model.module.close()


def full_state(trained_model: TrainedModel) -> FullState:
    """Returns parameters, optimizer state, buffers and the buffers of the last exchange, all in full tensors."""
    with trained_model.model.being_saved():
        return _full_state(trained_model)


def _full_state(trained_model: TrainedModel) -> FullState:
    module, exchanges = trained_model.model.module, trained_model.model.exchange_state()
    agreed = dict(trained_model.model.agreed_buffers)  # after exchange_state, which takes loaded weights into account
    pending = [pending_exchange.pop("pieces") for pending_exchange in exchanges["trips"]]
    if not isinstance(module, Sharded):
        own = {name: local_tensor(tensor) for name, tensor in (*module.named_buffers(), *module.named_parameters())}
        return {
            "parameters": {name: whole_tensor(parameter) for name, parameter in module.named_parameters()},
            "optimizer": _whole_optimizer_state(trained_model.optimizer),
            "buffers": {name: whole_tensor(buffer) for name, buffer in module.named_buffers()},
            "agreed": agreed,
            "exchanges": exchanges,
            "pending": [[_full_piece(module, piece) for piece in pending_exchange] for pending_exchange in pending],
            "form": _form(_state_dict(module), own, exchanges),
            "trained": trained_model.model.trained_names,
        }
    full = full_state_dict(module, trained_model.optimizer, device="cpu")
    if not full:
        raise CheckpointError(
            "a checkpoint was asked for, but this rank has no share of the network and cannot keep its state. "
            "Leave the rank out of the run, or give it a share."
        )
    buffers = dict(module.named_buffers())
    names = {name for name, _ in module.named_parameters()}
    saved = {name: value for name, value in full["model"].items() if name in names or name in buffers}
    return {
        "parameters": {name: value for name, value in saved.items() if name in names},
        "optimizer": {**full["optimizer"], "dropout": full["dropout"], "class": full["optimizer_class"]},
        "buffers": {name: value for name, value in saved.items() if name in buffers},
        "agreed": {name: _full_tensor(buffers[name], value) for name, value in agreed.items()},
        "exchanges": {
            **exchanges,
            "trips": [
                _with_buffers(pending_exchange, _full_tensor, buffers) for pending_exchange in exchanges["trips"]
            ],
        },
        "pending": [[_full_piece(module, piece) for piece in pending_exchange] for pending_exchange in pending],
        "form": _form(full["model"], saved, exchanges),
        "trained": trained_model.model.trained_names,
    }


def _state_dict(module: torch.nn.Module) -> Mapping[str, object] | None:
    """Returns the state_dict of a network; None if the network refuses it: its tensors are saved nevertheless."""
    try:
        state: Mapping[str, object] = module.state_dict(keep_vars=True)
    except Exception:
        logger.warning("a checkpoint is saved without the names of the state_dict, which failed", exc_info=True)
        return None
    return changed_state(state, local_tensor)


def _form(
    state: Mapping[str, object] | None, tensors: Mapping[str, torch.Tensor], exchanges: ExchangeState
) -> StateForm | None:
    """Returns how the state_dict of a network is made of its tensors."""
    if state is None:
        return None
    exchanged = {*exchanges.get("averaged", ()), *exchanges.get("policies", ())}
    return form_of(state, tensors, {name: tensor for name, tensor in tensors.items() if name in exchanged})


def local_exchanges(trained_model: TrainedModel, node: NodeState, rank: LocalState) -> ExchangeState | None:
    """Returns a checkpoint's state of past and pending exchanges, cut as the network is on this rank."""
    saved, module = rank["exchanges"], trained_model.model.module
    if saved is None:
        return None
    parameters, buffers = (dict(named) for named in (module.named_parameters(), module.named_buffers()))
    pending_exchanges: list[PendingState] = []
    for pending_exchange, pieces in zip(saved["trips"], node["pending"], strict=True):
        local_pieces: list[PayloadEntryState] = [
            {**piece, "value": part_of(parameters[piece["home"]], piece["value"])} for piece in pieces
        ]
        pending_exchanges.append({**_with_buffers(pending_exchange, part_of, buffers), "pieces": local_pieces})
    return {**saved, "trips": pending_exchanges}


def _with_buffers(
    pending_exchange: PendingState,
    convert: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    owners: dict[str, torch.Tensor],
) -> PendingState:
    """Returns a saved exchange with its buffers, snapshot and agreed, converted to full tensors or to parts."""
    return {
        **pending_exchange,
        "snapshot": {name: convert(owners[name], value) for name, value in pending_exchange["snapshot"].items()},
        "buffers": {name: convert(owners[name], value) for name, value in pending_exchange["buffers"].items()},
    }


def put_state(trained_model: TrainedModel, node: NodeState, rank: LocalState) -> None:
    """Loads a state in full tensors into the network and its optimizer."""
    module, optimizer, saved = trained_model.model.module, trained_model.optimizer, dict(node["optimizer"])
    dropout, kind = saved.pop("dropout", None), saved.pop("class", None)
    if isinstance(module, Sharded):
        model = {**node["parameters"], **rank["buffers"]}
        state = {"model": model, "optimizer": saved, "dropout": dropout}
        load = partial(load_full_state_dict, module, state, optimizer, strict=False)
        load_optimizer(optimizer, saved, kind, load)
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved["state"] = {
        index: {
            slot: _placed_like(parameters[index], value) if index < len(parameters) else value
            for slot, value in slots.items()
        }
        for index, slots in saved["state"].items()
    }
    with torch.no_grad():
        for name, buffer in _in_copy_order(module.named_buffers(), set(module.state_dict())):
            if name in rank["buffers"]:
                local_tensor(buffer).copy_(part_of(buffer, rank["buffers"][name]))
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        for name, parameter in _in_copy_order(module.named_parameters(), trained):
            local_tensor(parameter).copy_(part_of(parameter, node["parameters"][name]))
    load_optimizer(optimizer, saved, kind, partial(optimizer.load_state_dict, saved))


def _in_copy_order(
    named: Iterable[tuple[str, torch.Tensor]], preferred: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors in copy order: of those that share memory, the one that exchanges use is copied last."""
    order = sorted(enumerate(named), key=lambda row: (row[1][0] in preferred, row[1][1].nbytes, -row[0]))
    return (row for _, row in order)


def part_of(owner: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a full tensor, cut like its owner."""
    placement = local_shard_of(owner)
    return full if placement is None else placement.part(full)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of a synchronized network; of a DTensor all of it, in host memory, on all ranks that hold it."""
    return _whole(tensor, local_shard_of(tensor)) if is_dtensor(tensor) else tensor


def _whole(tensor: torch.Tensor, placement: LocalShard | None) -> torch.Tensor:
    if placement is None:
        full: torch.Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
        return full.detach().cpu()
    return placement.full(local_tensor(tensor).detach().cpu())


def _whole_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state of an optimizer in full tensors, and its class."""
    saved = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {slot: _whole_slot(parameters[index], value) for slot, value in slots.items()}
        for index, slots in saved["state"].items()
    }
    return {**saved, "state": state, "class": type(optimizer).__name__}


def _whole_slot(parameter: torch.Tensor, value: object) -> object:
    if not isinstance(value, torch.Tensor) or not is_dtensor(value):
        return value
    is_alike = is_dtensor(parameter) and value.placements == parameter.placements and value.shape == parameter.shape
    return _whole(value, local_shard_of(parameter) if is_alike else None)


def _placed_like(parameter: torch.Tensor, value: object) -> object:
    """Returns an entry of an optimizer's state, placed like its parameter if it is laid out like it."""
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return placed_like(parameter, value)
    return value


def changed_state(
    state: Mapping[str, object], change: Callable[[torch.Tensor], torch.Tensor]
) -> OrderedDict[str, object]:
    """Returns a state_dict with changed tensors, and the versions of its modules."""
    changed = OrderedDict(
        (key, change(value) if isinstance(value, torch.Tensor) else value) for key, value in state.items()
    )
    set_versions(changed, versions_of(state))
    return changed


def _full_piece(module: torch.nn.Module, piece: PayloadEntryState) -> PayloadEntryState:
    return {**piece, "value": _full_tensor(dict(module.named_parameters())[piece["home"]], piece["value"])}


def _full_tensor(owner: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    placement = local_shard_of(owner)
    return part if placement is None else placement.full(part)
