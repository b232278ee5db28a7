"""Where a process really runs, whatever its launcher calls the place."""

import os
import socket
from pathlib import Path

from evenly.launch.place import Place
from evenly.spec._value import Value


class Identity(Value):
    """The marks by which processes of one node know each other.

    No single mark is enough: two SLURM nodes may share a hostname, two containers a kernel, two namespaces a machine.
    `boot_id` is "" and `netns` 0 where the system has none.
    """

    hostname: str
    boot_id: str
    netns: int
    node_id: str
    pid: int


def identity(place: Place) -> Identity:
    """Returns the marks of this process, with the node as its launcher names it."""
    return Identity(
        hostname=socket.gethostname(), boot_id=boot_id(), netns=_netns(), node_id=place.node_id, pid=os.getpid()
    )


def boot_id() -> str:
    """Returns what tells this start of this machine from all others; "" where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _netns() -> int:
    try:
        return Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return 0
