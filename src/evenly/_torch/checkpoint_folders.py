"""Reads a folder of torch.distributed.checkpoint without running code that somebody may have put into it.

Its file `.metadata` is a pickle. Of the names in it only those are looked up that such a file needs: classes that hold
values. Other values are loaded with `weights_only=True`.
"""

import io
import os
import pickle  # only names that are listed are looked up
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import IO, Any

import torch

LISTED: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size"}),
    "collections": frozenset({"OrderedDict"}),
    "builtins": frozenset({"set"}),
    **dict.fromkeys(
        ("pathlib", "pathlib._local"), frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"})
    ),
}


class ListedUnpickler(pickle.Unpickler):
    """Reads a pickle that has only names that are listed, and dtypes of torch."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns what a name in the pickle stands for."""
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and name not in LISTED.get(module, ()):
            raise ValueError(f"it has {module[:60]}.{name[:60]}, which could run code")
        return super().find_class(module, name)


def open_folder(folder: Path) -> tuple[Any, Any, Any]:
    """Returns the reader of a folder, the planner to load with, and the folder's metadata."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
    from torch.distributed.checkpoint.planner import ReadItem

    class ListedReader(FileSystemReader):
        """Reads files of the folder only."""

        def read_metadata(self, *_: object, **__: object) -> Metadata:
            with (folder / ".metadata").open("rb") as stream:
                metadata = _read_listed(stream)
            if not isinstance(metadata, Metadata):
                raise ValueError(f"its metadata are a {type(metadata).__name__}")
            for info in (metadata.storage_data or {}).values():
                _require_inside(info.relative_path)
            storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
            storage_meta.load_id = self.load_id
            metadata.storage_meta = storage_meta
            return metadata

    class ListedPlanner(DefaultLoadPlanner):
        """Loads values that are no tensors without running code."""

        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    reader = ListedReader(os.fspath(folder))
    return reader, ListedPlanner(), reader.read_metadata()


def _read_listed(stream: IO[bytes]) -> object:
    return ListedUnpickler(stream).load()


def _require_inside(relative_path: object) -> None:
    path = PurePath(str(relative_path))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"it names the file {str(path)[:80]!r}, which is outside of the folder")
