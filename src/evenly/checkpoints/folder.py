"""Checkpoint folders: written beside, checked by SHA-256, renamed when complete."""

import json
import logging
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from evenly.checkpoints.files import damaged, digest_of_file, flush, require_file
from evenly.checkpoints.manifest import ENDINGS, MANIFEST, write_manifest
from evenly.comm.nested_state import Json, entry_at, flatten, restore

logger = logging.getLogger(__name__)

BEST = "best.json"  # the values of checkpoints, beside them
NAME = re.compile(r"step-([0-9]{9,18})")
EARLIER = re.compile(r"earlier-[0-9]{1,18}")
SYSTEM_ERROR = re.compile(r"\(os error ([0-9]+)\)")
UNREADABLE = (OSError, SafetensorError, ValueError, RecursionError, KeyError, TypeError, AttributeError, RuntimeError)
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class CopiedPart:
    """A nested value as it was when it was copied: its tensors, and the rest as JSON."""

    name: str
    content: Json
    tensors: dict[str, torch.Tensor]


def copied(name: str, value: object) -> CopiedPart:
    """Returns a copy of a nested value in host memory, to be written as `name`.safetensors and `name`.json."""
    tensors: dict[str, torch.Tensor] = {}
    return CopiedPart(name, flatten(value, name, tensors), tensors)


def write_part(folder: Path, part: CopiedPart) -> dict[str, str]:
    """Writes both files of a part to disk; returns their SHA-256."""
    tensor_file, json_file = (folder / f"{part.name}.{ending}" for ending in ENDINGS)
    try:
        save_file(part.tensors, tensor_file)
    except SafetensorError as error:
        number = SYSTEM_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error)) from None
    json_file.write_text(json.dumps(part.content))
    digests = {}
    for file in (tensor_file, json_file):
        digests[file.name] = digest_of_file(file)
        flush(file)
    return digests


def read_part(folder: Path, name: str, digests: Mapping[str, str], sizes: Mapping[str, int] = NOTHING) -> Any:
    """Returns the value that `write_part` wrote, after checking both files."""
    _require_intact(folder, name, digests, sizes)
    try:
        tensors = load_file(folder / f"{name}.safetensors")
        return restore(json.loads((folder / f"{name}.json").read_text()), tensors)
    except UNREADABLE as error:
        raise damaged(folder / f"{name}.json", f"{type(error).__name__}: {error}") from None


def read_entries(
    folder: Path,
    name: str,
    digests: Mapping[str, str],
    paths: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int] = NOTHING,
) -> list[Any]:
    """Returns the values at some `paths` of what `write_part` wrote; only their tensors are held in memory.

    Both files are checked as a whole. A path that is not there gives None.
    """
    _require_intact(folder, name, digests, sizes)
    try:
        content = json.loads((folder / f"{name}.json").read_text())
        with safe_open(folder / f"{name}.safetensors", framework="pt") as tensors:
            return [restore(entry_at(content, path), _StoredTensors(tensors)) for path in paths]
    except UNREADABLE as error:
        raise damaged(folder / f"{name}.json", f"{type(error).__name__}: {error}") from None


class _StoredTensors(dict[str, torch.Tensor]):
    """The tensors of a safetensors file, each read when it is taken, once."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file
        self._taken: set[str] = set()

    def pop(self, name: str, *_: object) -> torch.Tensor:
        if name in self._taken:
            raise KeyError(name)
        self._taken.add(name)
        return cast("torch.Tensor", self._file.get_tensor(name))


def make(partial: Path) -> None:
    """Makes the folder to write a checkpoint into, beside the others."""
    root = partial.parent
    is_new = not root.is_dir()
    partial.mkdir(parents=True)
    flush(root)
    if is_new:
        flush(root.parent)


def seal(partial: Path, final: Path, manifest: Mapping[str, object]) -> None:
    """Makes the folder `partial` the checkpoint `final`: from here on it exists and is complete."""
    write_manifest(partial, manifest)
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
    return sorted((path for path in root.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Returns the step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


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


def set_damaged_aside(path: Path) -> None:
    """Gives a damaged checkpoint another name, under which it is not found any more."""
    number, aside = 1, path.with_name(f"damaged-{path.name}")
    while aside.exists():
        number += 1
        aside = path.with_name(f"damaged-{path.name}-{number}")
    try:
        path.rename(aside)
        flush(path.parent)
    except FileNotFoundError:
        return  # another rank of this file system was first, or it is not there
    except OSError as error:
        logger.warning("the damaged checkpoint %s keeps its name: %s", path, error)


def clear(root: Path, *, keep: int, best: Collection[str] = ()) -> None:
    """Removes all but the last `keep` checkpoints and the `best`, and what a killed run left half written."""
    for path in (path for path in checkpoints(root)[:-keep] if path.name not in best):
        with suppress(OSError):
            path.rename(root / f".{path.name}.gone")  # a kill leaves nothing half removed under its name
    clear_partial(root)


def clear_partial(root: Path, *, but: Path | None = None) -> None:
    """Removes the folders that were not completed, `but` one."""
    for path in (path for path in root.glob(".step-*") if path != but):
        shutil.rmtree(path, ignore_errors=True)


def _require_intact(folder: Path, name: str, digests: Mapping[str, str], sizes: Mapping[str, int]) -> None:
    for file in (folder / f"{name}.{ending}" for ending in ENDINGS):
        digest = digests.get(file.name)
        if digest is None:
            raise damaged(file, "it is not in the manifest")
        require_file(file, size_bytes=sizes.get(file.name))
        try:
            actual_digest = digest_of_file(file)
        except OSError as error:
            raise damaged(file, f"it cannot be read ({error.strerror or error})") from None
        if actual_digest != digest:
            raise damaged(file, f"its SHA-256 is {actual_digest[:16]}..., the manifest says {digest[:16]}...")
