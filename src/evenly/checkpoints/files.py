"""Files of checkpoints: flushed to disk, hashed, and opened only if they are plain files of their folder."""

import hashlib
import os
import stat
from pathlib import Path

from evenly.errors import CheckpointDamageError


def flush(path: Path) -> None:
    """Writes a file or folder to disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_of_file(file: Path) -> str:
    """Returns the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_file(file: Path, *, most_bytes: int | None = None, size_bytes: int | None = None) -> None:
    """Raises `CheckpointDamageError` unless a plain file is there, no link, of `size_bytes` or at most `most_bytes`."""
    try:
        found = file.lstat()
        actual_bytes = found.st_size
        if stat.S_ISLNK(found.st_mode):
            case = "it is a link to another place"
        elif not stat.S_ISREG(found.st_mode):
            case = "it is not a file"
        elif size_bytes is not None and actual_bytes != size_bytes:
            case = f"it has {actual_bytes} bytes, the manifest says {size_bytes}"
        elif most_bytes is not None and actual_bytes > most_bytes:
            case = f"it has {actual_bytes} bytes, and no such file has more than {most_bytes}"
        else:
            return
    except OSError as error:
        case = f"the file is missing ({error.strerror or error})"
    raise damaged(file, case)


def damaged(file: Path, reason: str) -> CheckpointDamageError:
    """Returns the error for a file of a checkpoint that cannot be used."""
    return CheckpointDamageError(
        f"the checkpoint file {file} was to be read, but it is damaged: {reason}. "
        f"Use another checkpoint than {file.parent.name}, or restore the file from a copy."
    )
