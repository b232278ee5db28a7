"""Saves the weights of a model while it trains: the average that `agreed()` shows, as one file."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evenly.checkpoints.full_state import TrainedModel, changed_state, whole_tensor
from evenly.checkpoints.weight_files import WeightState, plain_state, require_free, write_weights
from evenly.comm import ObjectGatherer
from evenly.errors import CheckpointError, SpecError
from evenly.shards import Sharded, full_state_dict


def save_average(
    to: str | os.PathLike[str],
    trained_models: Sequence[TrainedModel],
    *,
    name: str | None,
    gatherer: ObjectGatherer,
    rank: int,
) -> Path:
    """Writes the average of one model over all nodes; all ranks call it together, and the first that has it writes."""
    model = _chosen(trained_models, name).model
    state: WeightState | None = None
    error: Exception | None = None
    with model.agreed():
        whole = _whole_state(model.module)
        writer = gatherer.gather(whole is not None, "save the weights", where=f" to {os.fspath(to)}").index(True)
        if rank == writer and whole is not None:
            try:
                require_free(to, force=True)
                state = plain_state(whole)  # a copy: the block restores the values of this node
            except Exception as problem:
                error = problem
    if state is not None:
        try:
            write_weights(to, state)
        except Exception as problem:
            error = problem
    report = None if error is None else (isinstance(error, SpecError), f"{_kind(error)}{error}")
    reported = gatherer.gather(report, "the end of saving the weights")[writer]
    if reported is not None:
        is_wish, text = reported
        raise SpecError(text) if is_wish else CheckpointError(text)
    return Path(to)


def _whole_state(module: torch.nn.Module) -> Mapping[str, Any] | None:
    """Returns the state_dict of the uncut network; None on ranks of a cut network that do not get it."""
    if not isinstance(module, Sharded):
        return changed_state(module.state_dict(keep_vars=True), whole_tensor)
    full = full_state_dict(module, everywhere=False, device="cpu")
    return full["model"] if full else None


def _chosen(trained_models: Sequence[TrainedModel], name: str | None) -> TrainedModel:
    names = [trained_model.name for trained_model in trained_models]
    if name is None and len(names) == 1:
        return trained_models[0]
    if name not in names:
        case = f"has prepared {', '.join(map(repr, names))}" if names else "has prepared no model"
        asked = "the weights of a model" if name is None else f"the weights of {name!r}"
        raise SpecError(f"{asked} were to be saved, but the session {case}. Name one that it has prepared: name=.")
    return trained_models[names.index(name)]


def _kind(error: Exception) -> str:
    return "" if isinstance(error, SpecError | CheckpointError) else f"{type(error).__name__}: "
