"""One run at a time writes into a folder: a lock that ends with its process, and across machines a lease.

The file `.owner` in the folder is locked by its owner, which renews it every few seconds. On the owner's machine
the lock decides. Elsewhere, as not every shared file system has locks, a new run watches the file for a while: if it is
still renewed, the folder is owned; if not, a killed run left it behind.
"""

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from evenly.comm import ObjectGatherer
from evenly.errors import CheckpointError
from evenly.launch.host import boot_id

logger = logging.getLogger(__name__)

OWNER = ".owner"
RENEW_EVERY_S = 2.0
LEASE_S = 10.0
_SIZE = 4096  # bytes; the entry is written in one piece and is shorter

_owners: dict[str, "FolderOwner"] = {}  # of this process, as a lock does not exclude its own process
_owners_lock = threading.Lock()


class FolderOwner:
    """The ownership of a folder by this process, until `release`."""

    def __init__(self, folder: Path, token: str, handle: int) -> None:
        self._file, self._handle = folder / OWNER, handle
        self._stop = threading.Event()
        self._entry = {
            "token": token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot": boot_id(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        self._renewals = 0
        self._renew()
        self._thread = threading.Thread(target=self._renew_until_released, name="evenly-folder", daemon=True)
        self._thread.start()

    def describe(self) -> str:
        """Returns process, host and start time of the owner."""
        return _describe(self._entry)

    def require(self) -> None:
        """Raises `CheckpointError` if another run took the folder because this process did not renew it in time."""
        with suppress(OSError):
            if _same_file(self._handle, self._file) and self._still_owns():
                return
        raise CheckpointError(
            f"a checkpoint was to be written to {self._file.parent}, which this run held; since then another run has "
            "taken it, or removed the file .owner, as this process gave no sign of life. Nothing was written. Resume "
            "this run in a folder of its own."
        )

    def release(self) -> None:
        """Releases the folder."""
        self._stop.set()
        self._thread.join(timeout=5.0)
        with _owners_lock:  # closing the file drops all locks of this process on it, also a newer one
            _owners.pop(str(self._file.resolve()), None)
            with suppress(OSError):
                if _same_file(self._handle, self._file) and self._still_owns():
                    self._file.unlink()
            os.close(self._handle)

    def _renew_until_released(self) -> None:
        while not self._stop.wait(RENEW_EVERY_S):
            try:
                # if this process copied the folder, POSIX has dropped the lock
                _try_lock(self._file.parent, self._handle)
                if not self._still_owns():
                    return  # lost; `require` will raise
                self._renew()
            except CheckpointError:
                return  # as above
            except OSError as error:
                logger.warning("the hold on the folder %s could not be renewed: %s", self._file.parent, error)

    def _still_owns(self) -> bool:
        return read_owner(self._handle).get("token") == self._entry["token"]

    def _renew(self) -> None:
        self._renewals += 1
        text = json.dumps({**self._entry, "renewals": self._renewals})
        os.pwrite(self._handle, text.ljust(_SIZE).encode(), 0)


def hold_together(folder: Path, gatherer: ObjectGatherer, *, rank: int, leads: bool) -> FolderOwner | None:
    """Returns this process's ownership of the run's folder, if it has one; all ranks call it together.

    Rank 0 takes the folder, and so does the first rank (`leads`) of each node that has a folder of its own.

    Raises:
        CheckpointError: on all ranks, if another run holds it, or it cannot be written.
    """
    token = str(gatherer.gather(secrets.token_hex(8), "choose a token for the folder")[0])
    owner: FolderOwner | None = None
    for is_turn in (rank == 0, leads and rank != 0):
        problem = None
        try:
            if is_turn and not is_held_by(folder, token):
                owner = take_folder(folder, token)
        except CheckpointError as error:
            problem = str(error)
        problems = gatherer.gather(problem, "take the folder", where=f" {folder}")
        failed = [number for number, text in enumerate(problems) if text]
        if failed:
            if owner is not None:
                owner.release()
            raise CheckpointError(f"rank {failed[0]} says: {problems[failed[0]]}")
    return owner


def take_folder(folder: Path, token: str) -> FolderOwner:
    """Returns the ownership of `folder` by this process; the folder is created if needed.

    Raises:
        CheckpointError: another run holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _owners_lock:
            key = str((folder / OWNER).resolve())
            if key in _owners:
                raise _refused(folder, _owners[key].describe())
            handle = _lock(folder)
            _owners[key] = FolderOwner(folder, token, handle)
            return _owners[key]
    except OSError as error:
        raise CheckpointError(
            f"a run was to be written to the folder {folder}; that cannot be done: {error.strerror or error}. "
            "Give a folder that can be written."
        ) from None


def is_held_by(folder: Path, token: str) -> bool:
    """Whether the run of this `token` holds the folder already; only for processes that do not hold it themselves."""
    try:
        handle = os.open(folder / OWNER, os.O_RDONLY)
    except OSError:
        return False
    try:
        return read_owner(handle).get("token") == token
    finally:
        os.close(handle)


def read_owner(handle: int) -> dict[str, object]:
    """Returns the owner's entry in an open file; empty if it cannot be read."""
    try:
        entry = json.loads(os.pread(handle, _SIZE, 0))
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _lock(folder: Path) -> int:
    """Returns the open file `.owner`, locked where the file system can."""
    while True:
        handle = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            has_locks = _try_lock(folder, handle)
            if not _same_file(handle, folder / OWNER):  # its owner released it meanwhile
                os.close(handle)
                continue
            entry = read_owner(handle)
            on_this_machine = entry.get("boot") == boot_id() != ""
            if on_this_machine and not has_locks and _runs(entry):
                raise _refused(folder, _describe(entry))
            if entry and not on_this_machine and _is_renewed(handle, folder, entry):
                raise _refused(folder, _describe(read_owner(handle) or entry))
        except BaseException:
            os.close(handle)
            raise
        return handle


def _try_lock(folder: Path, handle: int) -> bool:
    """Locks the file; returns False where the file system has no locks."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process alone: forked workers do not inherit it
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise _refused(folder, _describe(read_owner(handle))) from None
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            return False
        raise
    return True


def _is_renewed(handle: int, folder: Path, entry: dict[str, object]) -> bool:
    """Whether a process on another machine still renews the file; waits for up to `LEASE_S`."""
    logger.warning("%s: %s had it last; waiting %g s for a sign of life", folder, _describe(entry), LEASE_S)
    until = time.monotonic() + LEASE_S
    while time.monotonic() < until:
        time.sleep(0.2)
        if read_owner(handle) != entry:
            return True
    return False


def _runs(entry: dict[str, object]) -> bool:
    try:
        os.kill(int(str(entry["pid"])), 0)
    except (KeyError, TypeError, ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _describe(entry: dict[str, object]) -> str:
    if not entry:
        return "a run that has just begun"
    return f"process {entry.get('pid')} on {entry.get('host')}, since {entry.get('since')}"


def _refused(folder: Path, holder: str) -> CheckpointError:
    return CheckpointError(
        f"a run was to be written to the folder {folder}, but another run holds it: {holder}. "
        "Wait until that run has ended, end it, or give another folder."
    )
