"""The full state of a network cut over ranks, to and from the checkpoints of `torch.distributed.checkpoint`."""

import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast

import torch
from torch.optim import Optimizer

from evenly.comm import first_line
from evenly.errors import CheckpointError
from evenly.shards.run.sharded import Sharded
from evenly.shards.state.full_state import State, full_state_dict, load_full_state_dict, parameter_names

SECTIONS = ("model", "optimizer", "optimizer_class", "dropout")

Keys = tuple[str | int, ...]  # the way to a value

_lock = threading.Lock()  # filters of warnings belong to the process, and ranks may be threads


def save_dcp(
    folder: str | os.PathLike[str],
    model: Sharded,
    optimizer: Optimizer | None = None,
    *,
    by: Literal["name", "index"] = "name",
) -> None:
    """Writes the full state as a checkpoint of `torch.distributed.checkpoint`, which plain torch programs can read.

    It holds `{"model": ..., "optimizer": ...}`. All ranks call it together; rank 0 of the wire writes.

    Args:
        folder: a folder that holds no checkpoint yet.
        model: the network.
        optimizer: an optimizer of `model.parameters()`.
        by: the form of the optimizer's state: by parameter `name`, as `get_optimizer_state_dict` of
            `torch.distributed.checkpoint.state_dict` has it, or by `index`, as `optimizer.state_dict()` has it.
    """
    state = full_state_dict(model, optimizer, everywhere=False, device="cpu")
    problem = None
    if state:
        try:
            if optimizer is not None and by == "name":
                state["optimizer"] = _by_name(state["optimizer"], parameter_names(model, optimizer))
            _write(Path(folder), state)
        except CheckpointError as error:
            problem = str(error)
    problem = model._stage.tell(problem, model._source)
    if problem:
        raise CheckpointError(problem)


def load_dcp(
    folder: str | os.PathLike[str], model: Sharded, optimizer: Optimizer | None = None, *, strict: bool = True
) -> None:
    """Puts this rank's parts of a checkpoint of `torch.distributed.checkpoint` into the network, in place.

    Args:
        folder: what `save_dcp` wrote for any split, or a plain torch program: `{"model": model.state_dict()}`, with
            `"optimizer"` in either form of `save_dcp`. Settings in it are unpickled: load what you trust.
        model: the network, cut in any way.
        optimizer: an optimizer of `model.parameters()`, to go on from the checkpoint's.
        strict: whether the checkpoint must hold exactly the network's parameters and buffers.
    """
    sections = SECTIONS if optimizer is not None else ("model", "dropout")
    load_full_state_dict(model, _read(Path(folder), sections), optimizer, strict=strict)


def _by_name(slots: State, names: Sequence[str]) -> State:
    if "" in names:
        raise CheckpointError(
            "the optimizer's state was to be saved by parameter names, but it holds parameters that are not the "
            "network's. Give by='index', or an optimizer of model.parameters() only."
        )
    state = {names[key] if isinstance(key, int) else key: held for key, held in slots["state"].items()}
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in slots["param_groups"]]
    return {**slots, "state": state, "param_groups": groups}


def _write(folder: Path, state: State) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    if (folder / ".metadata").exists():
        raise CheckpointError(
            f"a checkpoint was to be written to {folder}, but there is one already. Give another folder, or remove it."
        )
    with _translated(f"write a checkpoint to {folder}"):
        save(state, checkpoint_id=folder, no_dist=True)


def _read(folder: Path, sections: Sequence[str]) -> State:
    """Returns the sections of a checkpoint, or all of it if it has no section `model`."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    with _translated(f"read the checkpoint {folder}"):
        metadata = reader.read_metadata()
        known = metadata.planner_data or {}
        paths = {key: tuple(known.get(key, (key,))) for key in metadata.state_dict_metadata}
        if any(path[0] == "model" and len(path) > 1 for path in paths.values()):
            paths = {key: path for key, path in paths.items() if path[0] in sections}
        flat: State = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry := metadata.state_dict_metadata[key], TensorStorageMetadata)
            else None
            for key in paths
        }
        load(flat, storage_reader=reader, no_dist=True)
    return cast("State", _nest({paths[key]: value for key, value in flat.items()}))  # paths begin with a name


def _nest(flat: Mapping[Keys, object]) -> object:
    """Returns values by path as dicts in dicts; numbers on the way are places in lists."""
    if () in flat:
        return flat[()]
    below: dict[str | int, dict[Keys, object]] = {}
    for (key, *rest), value in flat.items():
        below.setdefault(key, {})[tuple(rest)] = value
    if below and all(isinstance(key, int) for key in below):
        return [_nest(below[key]) for key in sorted(below, key=int)]
    return {key: _nest(values) for key, values in below.items()}


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turns the errors of torch into `CheckpointError`, and does without its word that this is one process."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with _lock, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:  # not an Exception in torch
        cause: BaseException = next((found for found, _ in error.failures.values()), error)
        raise _failed(what, cause) from error
    except Exception as error:
        raise _failed(what, error) from error


def _failed(what: str, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"torch.distributed.checkpoint was to {what}, but it could not: {type(error).__name__}: {first_line(error)}. "
        "Give a folder that can be written, or one that holds a whole checkpoint."
    )
