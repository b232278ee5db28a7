"""The secret that the nodes of a run share, in a file that only its user can read."""

import os
import stat
from pathlib import Path

from evenly.errors import SpecError

FEWEST_BYTES = 16
MOST_BYTES = 4096
HOW = "Write one with: (umask 077; openssl rand -hex 32 > FILE), and copy it to every node."


def read_secret(path: Path) -> bytes:
    """Returns the secret in a file, without white space around it.

    Raises `SpecError` if others may read or write the file, or it is not this user's, or it has too few bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(f"the secret was to be read from {path}; {reason}. {HOW}") from None
    try:  # what is checked is what is read
        _require_private(path, os.fstat(descriptor))
        secret = os.read(descriptor, MOST_BYTES + 1).strip()
    finally:
        os.close(descriptor)
    return require_long(secret, source=f"the file {path}")


def _require_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SpecError(f"the secret was to be read from {path}; that is not a file. {HOW}")
    if status.st_uid != os.geteuid():
        raise SpecError(
            f"the secret was to be read from {path}; the file belongs to the user with number {status.st_uid}, not to "
            f"{os.geteuid()}, who runs this. Give a file of your own."
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise SpecError(
            f"the secret was to be read from {path}; its mode {mode:04o} lets others use it. Run: chmod 600 {path}"
        )


def require_long(secret: bytes, *, source: str) -> bytes:
    """Returns `secret`; raises `SpecError` if it is too short to be one, or too long."""
    if not FEWEST_BYTES <= len(secret) <= MOST_BYTES:
        raise SpecError(
            f"the secret was to be read from {source}; that has {len(secret)} bytes, and {FEWEST_BYTES} to "
            f"{MOST_BYTES} are needed. {HOW}"
        )
    return secret
