"""Reads and checks the files that verbs take and write."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from evenly.errors import SpecError
from evenly.spec import Cluster, Forecast, Graph, Plan, Profile
from evenly.spec._value import Document

KINDS: tuple[type[Document], ...] = (Cluster, Profile, Graph, Plan, Forecast)
MAKERS = {
    "Cluster": "evenly discover --out FILE",
    "Profile": "evenly measure MODEL --out FILE",
    "Graph": "evenly measure MODEL --graph-out FILE",
    "Plan": "evenly plan --out FILE",
}
Kind = TypeVar("Kind", bound=Document)


def read(kind: type[Kind], path: Path, option: str) -> Kind:
    """Returns the value in a file; if the file holds another kind of value, the error names it."""
    try:
        return kind.load(path)
    except SpecError:
        actual_kind = _actual_kind(kind, path)
        if actual_kind is None:
            raise
        raise SpecError(
            f"{option} {path} was given, but the file holds a {actual_kind}, not a {kind.__name__}. "
            f"Give a file that was written by: {MAKERS[kind.__name__]}."
        ) from None


def require_writable(*paths: Path | None) -> None:
    """Raises `SpecError` if a file cannot be written, before any work is done for it."""
    for path in paths:
        if path is None:
            continue
        folder = path.parent
        try:
            case = None if folder.is_dir() else f"there is no folder {folder}"
            case = case or (None if os.access(folder, os.W_OK) else f"the folder {folder} cannot be written to")
            case = "it is a folder" if path.is_dir() else case
        except OSError as error:
            case = error.strerror
        if case:
            raise SpecError(f"the file {path} was to be written, but {case}. Give a file in a folder of yours.")


def require_own_files(outputs: Sequence[Path | None], inputs: Sequence[Path]) -> None:
    """Raises `SpecError` if two outputs are one file, or if an output would replace a part of an input."""
    files = [path.resolve() for path in outputs if path is not None]
    for path in files:
        if files.count(path) > 1:
            raise SpecError(f"{path} was given for two outputs. Give each a file of its own.")
        for given in inputs:
            folder = given.resolve().parent if given.is_file() else given.resolve()
            if path.suffix == ".jsonl" and path.is_relative_to(folder):
                raise SpecError(f"{path} was to be written, but it is a part of the run {given}. Give another file.")


def _actual_kind(kind: type[Document], path: Path) -> str | None:
    for candidate in KINDS:
        try:
            if candidate is not kind:
                candidate.load(path)
                return candidate.__name__
        except SpecError:
            continue
    return None
