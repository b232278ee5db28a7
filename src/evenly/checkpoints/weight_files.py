"""The weights of one network as a file: safetensors, a `.pt` without code, or a torch.distributed.checkpoint folder.

A file is written beside its place and renamed when it is complete.
"""

import json
import os
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from evenly._torch.compiler import plain_name
from evenly._torch.modules import set_versions, versions_of
from evenly.checkpoints.dcp import read_state, write_state
from evenly.checkpoints.files import flush
from evenly.comm import first_line
from evenly.comm.nested_state import flatten, restore
from evenly.errors import CheckpointError, SpecError

FileKind = Literal["safetensors", "pt", "dcp"]
WeightState = OrderedDict[str, Any]  # a state_dict, with the versions of its modules

ENDINGS: Mapping[str, FileKind] = {".safetensors": "safetensors", ".pt": "pt", ".pth": "pt"}
HEADER = "evenly"  # the entry of a safetensors file's metadata that holds versions and plain values
VERSIONS = "versions"  # the entry of a torch.distributed.checkpoint folder beside "model"
NO_SAFETENSORS = (torch.complex128,)  # dtypes that the format does not know


def kind_of(to: str | os.PathLike[str]) -> FileKind:
    """Returns the kind of file that a path asks for: by its ending, or a folder, if it ends in a slash or is one."""
    text, path = os.fspath(to), Path(to)
    if text.endswith(("/", os.sep)) or path.is_dir():
        return "dcp"
    if path.suffix not in ENDINGS:
        raise SpecError(
            f"weights were to be written to {text}, but its ending is {path.suffix or 'missing'!r}. Give a file that "
            f"ends in {', '.join(ENDINGS)}, or a folder with a slash at its end, for torch.distributed.checkpoint."
        )
    return ENDINGS[path.suffix]


def require_free(to: str | os.PathLike[str], *, force: bool) -> None:
    """Raises `SpecError` unless weights may be written to a path: nothing is there, or `force` replaces such a file."""
    kind, path = kind_of(to), Path(to)
    if not path.exists() or (kind == "dcp" and path.is_dir() and not any(path.iterdir())):
        return
    if kind == "dcp" and not (path / ".metadata").is_file():
        case = "holds other files" if path.is_dir() else "is a file"
        raise SpecError(f"weights were to be written to {os.fspath(to)}, which {case}. Give another folder.")
    if not force:
        raise SpecError(f"weights were to be written to {os.fspath(to)}, which exists. Use --force to replace it.")


def plain_state(state: Mapping[str, Any]) -> WeightState:
    """Returns a state_dict under the names of the plain network, with tensors on the CPU that share no memory.

    Names of one tensor keep sharing it.
    """
    copies: dict[int, torch.Tensor] = {}
    plain: WeightState = OrderedDict()
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            value = copies.setdefault(id(value), value.detach().to("cpu", copy=True).contiguous())
        else:
            flatten(value, key, {})  # raises for what only a pickle could hold
        plain[plain_name(key)] = value
    versions = versions_of(state)
    if versions is not None:
        set_versions(plain, {plain_name(prefix): entry for prefix, entry in versions.items()})
    return plain


def write_weights(to: str | os.PathLike[str], state: WeightState) -> None:
    """Writes a plain state to a path in the form of its ending; what is there is replaced at once or not at all."""
    kind, path = kind_of(to), Path(to)
    require_free(to, force=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if kind == "safetensors":
            _write_safetensors(partial, state)
        elif kind == "pt":
            torch.save(state, partial)
        else:
            write_state(partial, {"model": dict(state), VERSIONS: json.dumps(versions_of(state))})
        _put_in_place(partial, path)
    except OSError as error:
        raise CheckpointError(
            f"weights were to be written to {path}, but {error.strerror or error}. Give a place that can be written."
        ) from error
    finally:
        _remove(partial)


def read_weights(path: Path) -> WeightState:
    """Returns the state in a file or folder that `write_weights` or another program wrote."""
    try:
        if path.is_dir():
            return _read_dcp(path)
        return _read_safetensors(path) if ENDINGS.get(path.suffix) == "safetensors" else _read_pt(path)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a file of another program leads to
        raise CheckpointError(
            f"weights were to be read from {path}, but it cannot be read: {first_line(error)} Give a whole file that "
            "evenly export, session.save or torch.save(model.state_dict()) wrote."
        ) from error


def _write_safetensors(file: Path, state: WeightState) -> None:
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    values = {key: value for key, value in state.items() if key not in tensors}
    inner: dict[str, torch.Tensor] = {}
    header = {"versions": versions_of(state), "values": flatten(values, "values", inner), "order": list(state)}
    unknown = next((key for key, tensor in tensors.items() if tensor.dtype in NO_SAFETENSORS), None)
    if inner or unknown:
        key = unknown or next(key for key, value in values.items() if _has_tensors(key, value))
        case = f"is {tensors[key].dtype}" if unknown else "is nested and contains tensors"
        raise CheckpointError(
            f"weights were to be written as safetensors, but {key!r} {case}, which the format cannot hold. "
            "Give a file that ends in .pt."
        )
    first_names = {id(tensor): key for key, tensor in reversed(tensors.items())}
    distinct = {  # the format has no shared memory
        key: tensor if first_names[id(tensor)] == key else tensor.clone() for key, tensor in tensors.items()
    }
    save_file(distinct, file, metadata={"format": "pt", HEADER: json.dumps(header)})


def _has_tensors(key: str, value: object) -> bool:
    tensors: dict[str, torch.Tensor] = {}
    flatten(value, key, tensors)
    return bool(tensors)


def _read_safetensors(file: Path) -> WeightState:
    state: WeightState = OrderedDict()
    with safe_open(file, framework="pt") as content:
        metadata = content.metadata() or {}
        tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118  # not a mapping
    header = json.loads(metadata.get(HEADER, "{}"))
    values = restore(header["values"], {}) if "values" in header else {}
    entries = {**tensors, **values}
    state.update({key: entries.pop(key) for key in header.get("order", ()) if key in entries} | entries)
    set_versions(state, header.get("versions"))
    return state


def _read_pt(file: Path) -> WeightState:
    state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"it holds a {type(state).__name__}, not a state_dict.")
    ordered: WeightState = OrderedDict(state)
    set_versions(ordered, versions_of(state))
    return ordered


def _read_dcp(folder: Path) -> WeightState:
    content = read_state(folder, ("model", VERSIONS))
    model = content.get("model")
    state: WeightState = OrderedDict(model if isinstance(model, Mapping) else content)
    versions = content.get(VERSIONS) if isinstance(model, Mapping) else None
    set_versions(state, json.loads(versions) if isinstance(versions, str) else None)
    return state


def _put_in_place(partial: Path, path: Path) -> None:
    """Renames a complete file or folder; one that is there stays until the new one can take its name."""
    if partial.is_file():
        flush(partial)
        partial.replace(path)
    elif path.is_dir() and any(path.iterdir()):
        previous = path.with_name(f".{path.name}.old")
        _remove(previous)
        path.rename(previous)
        partial.rename(path)
        _remove(previous)
    else:
        partial.rename(path)
    flush(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
