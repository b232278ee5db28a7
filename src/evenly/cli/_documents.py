"""Reads and checks the files that verbs take and write."""

import os
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


def _actual_kind(kind: type[Document], path: Path) -> str | None:
    for candidate in KINDS:
        try:
            if candidate is not kind:
                candidate.load(path)
                return candidate.__name__
        except SpecError:
            continue
    return None
