"""Checkpoint folders: written beside, checked by SHA-256, renamed when complete."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from evenly.checkpoints.states import Manifest
from evenly.comm.nested_state import entry_at, flatten, restore
from evenly.errors import CheckpointError

MANIFEST = "manifest.json"
BEST = "best.json"  # the values of checkpoints, beside them
VERSION = 3
NAME = re.compile(r"step-[0-9]{9,}")
EARLIER = re.compile(r"earlier-[0-9]{1,18}")


def write_part(folder: Path, name: str, value: object) -> dict[str, str]:
    """Writes one nested value as `name`.safetensors and `name`.json; returns the SHA-256 of both files."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(flatten(value, name, tensors))
    save_file(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(text)
    digests = {}
    for file in (folder / f"{name}.safetensors", folder / f"{name}.json"):
        digests[file.name] = _digest(file)
        flush(file)
    return digests


def read_part(folder: Path, name: str, digests: dict[str, str]) -> Any:
    """Returns the value that `write_part` wrote, after checking both files."""
    for file_name in (f"{name}.safetensors", f"{name}.json"):
        _require_intact(folder / file_name, digests.get(file_name))
    try:
        tensors = load_file(folder / f"{name}.safetensors")
        return restore(json.loads((folder / f"{name}.json").read_text()), tensors)
    except (SafetensorError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise _damaged(folder / name, str(error)) from None


def read_entries(folder: Path, name: str, digests: dict[str, str], paths: Sequence[tuple[str, ...]]) -> list[Any]:
    """Returns the values at some `paths` of what `write_part` wrote; only their tensors are held in memory.

    Both files are checked as a whole. A path that is not there gives None.
    """
    for file_name in (f"{name}.safetensors", f"{name}.json"):
        _require_intact(folder / file_name, digests.get(file_name))
    try:
        content = json.loads((folder / f"{name}.json").read_text())
        with safe_open(folder / f"{name}.safetensors", framework="pt") as tensors:
            return [restore(entry_at(content, path), _Stored(tensors)) for path in paths]
    except (SafetensorError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise _damaged(folder / name, str(error)) from None


class _Stored(dict[str, torch.Tensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def __missing__(self, name: str) -> torch.Tensor:
        return cast("torch.Tensor", self._file.get_tensor(name))


def seal(partial: Path, final: Path, manifest: Mapping[str, object]) -> None:
    """Makes the folder `partial` the checkpoint `final`: from here on it exists and is complete."""
    file = partial / MANIFEST
    text = {"version": VERSION, **manifest}
    file.write_text(json.dumps({**text, "sha256": _digest_of(text)}, indent=1))
    flush(file)
    flush(partial)
    if final.exists():  # saved at the same step before: keep the older one until the newer is in place
        previous = final.with_name(f".{final.name}.old")
        shutil.rmtree(previous, ignore_errors=True)
        final.rename(previous)
        partial.rename(final)
        shutil.rmtree(previous, ignore_errors=True)
    else:
        partial.rename(final)
    flush(final.parent)


def checkpoints(root: Path) -> list[Path]:
    """Returns the checkpoints in `root`, oldest first; those that are being written have other names."""
    return sorted(path for path in root.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir())


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint, after checking it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(folder / MANIFEST, str(error)) from None
    if not isinstance(manifest, dict):
        raise _damaged(folder / MANIFEST, "it is not a JSON object")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} has version {manifest.get('version')}, this library reads version {VERSION}. "
            "Resume with the version that wrote it."
        )
    expected_digest, actual_digest = manifest.pop("sha256", None), _digest_of(manifest)
    if expected_digest != actual_digest:
        raise _damaged(
            folder / MANIFEST, f"its SHA-256 is {actual_digest[:16]}..., it says {str(expected_digest)[:16]}..."
        )
    return cast("Manifest", manifest)  # as it was sealed


def recover(root: Path) -> None:
    """Restores the name of a checkpoint whose replacement was interrupted by a kill."""
    for previous in root.glob(".step-*.old"):
        final = root / previous.name.removeprefix(".").removesuffix(".old")
        if (previous / MANIFEST).is_file() and not final.exists():
            previous.rename(final)


def set_aside(root: Path) -> None:
    """Moves all checkpoints in `root` into a new folder `earlier-N` there."""
    paths = checkpoints(root)
    if paths:
        numbers = [int(path.name[len("earlier-") :]) for path in root.iterdir() if EARLIER.fullmatch(path.name)]
        aside = root / f"earlier-{1 + max(numbers, default=0)}"
        aside.mkdir()
        for path in [*paths, *root.glob(BEST)]:
            path.rename(aside / path.name)


def clear(root: Path, *, keep: int, best: Collection[str] = ()) -> None:
    """Removes folders that a killed run left half written, and all but the last `keep` checkpoints and the `best`."""
    for path in root.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in (path for path in checkpoints(root)[:-keep] if path.name not in best):
        shutil.rmtree(path, ignore_errors=True)


def _require_intact(file: Path, digest: str | None) -> None:
    if digest is None or not file.is_file():
        raise _damaged(file, "the file is missing or not in the manifest")
    actual_digest = _digest(file)
    if actual_digest != digest:
        raise _damaged(file, f"its SHA-256 is {actual_digest[:16]}..., the manifest says {digest[:16]}...")


def _damaged(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint file {file} is damaged: {reason}. "
        f"Remove the folder {file.parent} to resume from the checkpoint before it, or restore it from a copy."
    )


def _digest_of(manifest: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Writes a file or folder to disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
