"""The manifest of a checkpoint: what it holds, and the SHA-256 of its files and of itself."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from evenly.checkpoints.files import damaged, flush, require_file
from evenly.checkpoints.states import Manifest
from evenly.errors import CheckpointError

MANIFEST = "manifest.json"
VERSION = 3
MOST_BYTES = 2**26  # a manifest of a million tensors is smaller
MOST = 2**53  # of steps, epochs and bytes
SHA_256 = re.compile(r"[0-9a-f]{64}")
ENDINGS = ("safetensors", "json")
KEYS = {"step", "epoch", "nodes", "models", "files", "sizes", "ended_epochs"}


def file_names(nodes: list[list[int]]) -> set[str]:
    """Returns the names of the files of a checkpoint of these nodes, besides the manifest.

    >>> sorted(file_names([[0]]))
    ['node-0.json', 'node-0.safetensors', 'rank-0.json', 'rank-0.safetensors']
    """
    parts = [*(f"node-{node}" for node in range(len(nodes))), *(f"rank-{rank}" for ranks in nodes for rank in ranks)]
    return {f"{part}.{ending}" for part in parts for ending in ENDINGS}


def write_manifest(folder: Path, manifest: Mapping[str, object]) -> None:
    """Writes the manifest of a checkpoint to disk."""
    file = folder / MANIFEST
    content = {"version": VERSION, **manifest}
    file.write_text(json.dumps({**content, "sha256": _digest_of(content)}, indent=1))
    flush(file)


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint, after checking it."""
    file = folder / MANIFEST
    require_file(file, most_bytes=MOST_BYTES)
    try:
        content = json.loads(file.read_text())
        digest = _digest_of({key: value for key, value in content.items() if key != "sha256"})
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise damaged(file, str(error)) from None
    expected_digest = content.pop("sha256", None)
    if content.get("version") != VERSION and expected_digest in (None, digest):  # written so
        raise CheckpointError(
            f"{folder} has version {str(content.get('version'))[:20]}, this library reads version {VERSION}. "
            "Resume with the version that wrote it."
        )
    if expected_digest != digest:
        raise damaged(file, f"its SHA-256 is {digest[:16]}..., it says {str(expected_digest)[:16]}...")
    del content["version"]
    if problem := _misform(content):
        raise damaged(file, problem)
    return cast("Manifest", content)


def _digest_of(manifest: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _misform(content: dict[str, Any]) -> str:
    """Returns what is wrong with the values of a manifest; empty if nothing is."""
    for key in ("step", "epoch", "ended_epochs"):
        if not _is_count(content.get(key, 0 if key == "ended_epochs" else None)):
            return f"its {key!r} is not a whole number between 0 and 2^53"
    if content.keys() - KEYS:
        return f"it has {str(min(content.keys() - KEYS))[:40]!r}, which no manifest has"
    if not _are_nodes(content.get("nodes")):
        return "its 'nodes' are not lists of the ranks 0, 1, 2, ..., each in one of them"
    models = content.get("models")
    if not isinstance(models, dict) or not all(_are_texts(form) for form in models.values()):
        return "its 'models' do not have a dtype and shape for each tensor"
    files = content.get("files")
    digests = files.values() if isinstance(files, dict) and _are_texts(files) else [""]
    if not isinstance(files, dict) or not all(map(SHA_256.fullmatch, digests)):
        return "its 'files' do not have a SHA-256 each"
    count = len(ENDINGS) * (len(content["nodes"]) + sum(map(len, content["nodes"])))
    if len(files) != count:
        return f"its 'files' are {len(files)}, and its nodes have {count}"
    names = file_names(content["nodes"])
    if strange := sorted(files.keys() ^ names):
        return f"its 'files' are not those of its nodes, as {strange[0][:40]!r} shows"
    sizes = content.get("sizes", {})
    if not isinstance(sizes, dict) or sizes.keys() - names or not all(map(_is_count, sizes.values())):
        return "its 'sizes' do not have the bytes of each file"
    return ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _are_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _are_nodes(nodes: object) -> bool:
    if not isinstance(nodes, list) or not nodes or not all(isinstance(ranks, list) and ranks for ranks in nodes):
        return False
    ranks = [rank for members in nodes for rank in members]
    return all(map(_is_count, ranks)) and sorted(ranks) == list(range(len(ranks)))
