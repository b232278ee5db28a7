"""What a lab leaves on a machine while it stands, and should not after."""

import time
from pathlib import Path

import psutil

from evenly.lab import _cgroups, _network


def traces(owner: int) -> set[str]:
    """Returns the namespaces and control groups of the labs of a process."""
    found = _cgroups.find_hierarchy()
    names = _network.namespaces() | (_cgroups.labs(found) if found else set())
    return {name for name in names if name.startswith(f"evn{owner}-")}


def processes(word: str) -> list[int]:
    """Returns the living processes that have `word` among the words of their command."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if word in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def wait_until(true, *, seconds: float = 10.0) -> bool:
    """Returns whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def has_text(path: Path, *, lines: int) -> bool:
    """Returns whether a file has at least so many lines."""
    return path.exists() and path.read_text().count("\n") >= lines
