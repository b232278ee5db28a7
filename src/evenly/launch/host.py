"""The host of a process, independent of its launcher."""

import os
import socket
from pathlib import Path

from evenly.launch.launchers.place import Place
from evenly.spec._value import Value


class Identity(Value):
    """What identifies the node of a process.

    No single field is enough: two SLURM nodes may share a hostname, two containers a kernel, two namespaces a machine.
    `boot_id` is "" and `netns` 0 where the system has none.
    """

    hostname: str
    boot_id: str
    netns: int
    node_id: str
    pid: int


def identity(place: Place) -> Identity:
    """Returns the identity of this process, with the launcher's node id."""
    return Identity(
        hostname=socket.gethostname(), boot_id=boot_id(), netns=_netns(), node_id=place.node_id, pid=os.getpid()
    )


def boot_id() -> str:
    """Returns the id of this boot of this machine; "" if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _netns() -> int:
    try:
        return Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return 0


def machine_id() -> str:
    """Returns what processes have in common that may share memory; "" if the system does not say.

    Process ids have to mean the same to both, and emulated nodes of one machine count as machines of their own.
    """
    boot = boot_id()
    try:
        processes = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return ""
    return boot and f"{socket.gethostname()} {boot} {processes} {_netns()} {os.getuid()}"
