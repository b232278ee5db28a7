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

from evenly._torch.checkpoint_folders import open_folder
from evenly.comm import first_line
from evenly.errors import CheckpointError
from evenly.shards.run.sharded import Sharded
from evenly.shards.state.full_state import StateDict, full_state_dict, load_full_state_dict, parameter_names

SECTIONS = ("model", "optimizer", "optimizer_class", "dropout")

Keys = tuple[str | int, ...]  # the path of a value

_lock = threading.Lock()  # warning filters belong to the process, and ranks may be threads


def save_dcp(
    folder: str | os.PathLike[str],
    model: Sharded,
    optimizer: Optimizer | None = None,
    *,
    by: Literal["name", "index"] = "name",
) -> None:
    """Writes the full state as a checkpoint of `torch.distributed.checkpoint`, which plain torch programs can read.

    It holds `{"model": ..., "optimizer": ...}`. All ranks call it together; the first rank of the network writes.

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
            write_state(Path(folder), state)
        except CheckpointError as error:
            problem = str(error)
    problem = model._all_ranks_group.broadcast_object(problem, model._source)
    if problem:
        raise CheckpointError(problem)


def load_dcp(
    folder: str | os.PathLike[str], model: Sharded, optimizer: Optimizer | None = None, *, strict: bool = True
) -> None:
    """Puts this rank's parts of a checkpoint of `torch.distributed.checkpoint` into the network, in place.

    Args:
        folder: what `save_dcp` wrote for any split, or a plain torch program: `{"model": model.state_dict()}`, with
            `"optimizer"` in either form of `save_dcp`. What could run code in it raises `CheckpointError`.
        model: the network, cut in any way.
        optimizer: an optimizer of `model.parameters()`, to continue from the checkpoint's state.
        strict: whether the checkpoint must hold exactly the network's parameters and buffers.
    """
    sections = SECTIONS if optimizer is not None else ("model", "dropout")
    load_full_state_dict(model, read_state(Path(folder), sections), optimizer, strict=strict)


def _by_name(slots: StateDict, names: Sequence[str]) -> StateDict:
    if "" in names:
        raise CheckpointError(
            "the optimizer's state was to be saved by parameter names, but it holds parameters that are not the "
            "network's. Give by='index', or an optimizer of model.parameters() only."
        )
    state = {names[key] if isinstance(key, int) else key: slot_state for key, slot_state in slots["state"].items()}
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in slots["param_groups"]]
    return {**slots, "state": state, "param_groups": groups}


def write_state(folder: Path, state: StateDict) -> None:
    """Writes a nested state as a checkpoint of one process."""
    from torch.distributed.checkpoint.state_dict_saver import save

    if (folder / ".metadata").exists():
        raise CheckpointError(
            f"a checkpoint was to be written to {folder}, but there is one already. Give another folder, or remove it."
        )
    with _translate_errors(f"write a checkpoint to {folder}"):
        save(state, checkpoint_id=folder, no_dist=True)


def read_state(folder: Path, sections: Sequence[str]) -> StateDict:
    """Returns the sections of a checkpoint, or all of it if it has no section `model`."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    with _translate_errors(f"read the checkpoint {folder}"):
        reader, planner, metadata = open_folder(folder)
        key_paths = metadata.planner_data or {}
        paths = {key: tuple(key_paths.get(key, (key,))) for key in metadata.state_dict_metadata}
        if any(path[0] == "model" and len(path) > 1 for path in paths.values()):
            paths = {key: path for key, path in paths.items() if path[0] in sections}
        flat: StateDict = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry := metadata.state_dict_metadata[key], TensorStorageMetadata)
            else None
            for key in paths
        }
        load(flat, storage_reader=reader, planner=planner, no_dist=True)
    return cast("StateDict", _nest({paths[key]: value for key, value in flat.items()}))  # paths begin with a name


def _nest(flat: Mapping[Keys, object]) -> object:
    """Returns nested dicts of values by path; numbers in a path are indices of lists."""
    if () in flat:
        return flat[()]
    children: dict[str | int, dict[Keys, object]] = {}
    for (key, *subpath), value in flat.items():
        children.setdefault(key, {})[tuple(subpath)] = value
    if children and all(isinstance(key, int) for key in children):
        return [_nest(children[key]) for key in sorted(children, key=int)]
    return {key: _nest(values) for key, values in children.items()}


@contextmanager
def _translate_errors(action: str) -> Iterator[None]:
    """Turns torch's errors into `CheckpointError` and hides its warning about a single process."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with _lock, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:  # not an Exception in torch
        cause: BaseException = next((failure for failure, _ in error.failures.values()), error)
        raise _failed(action, cause) from error
    except Exception as error:
        raise _failed(action, error) from error


def _failed(action: str, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"torch.distributed.checkpoint was to {action}, but it could not: {type(error).__name__}: {first_line(error)}. "
        "Give a folder that can be written, or one that holds a whole checkpoint."
    )
