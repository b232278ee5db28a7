"""What this machine lacks for a lab."""

import os
import shutil
import subprocess
import sys

from evenly.errors import LabError
from evenly.lab._cgroups import Hierarchy, enable, find_hierarchy

_PROGRAMS = ("ip", "tc", "nsenter", "unshare", "setpriv", "mount", "umount", "sh", "env")
# Tried in namespaces that vanish with the command.
_PROBES = (
    ("namespaces of network, hostname and mounts", "true"),
    ("veth links", "ip link add probe0 type veth peer name probe1"),
    ("bridges", "ip link add probe0 type bridge"),
    ("the tbf queueing discipline", "tc qdisc add dev lo root tbf rate 1mbit burst 16kb latency 50ms"),
)


def missing() -> str | None:
    """Returns one sentence saying what this machine lacks for a lab, None if nothing."""
    if not sys.platform.startswith("linux"):
        return f"The lab needs Linux, and this is {sys.platform}; run it on a Linux machine."
    if os.geteuid() != 0:
        return f"The lab needs root, and this is user {os.geteuid()}; run it with sudo."
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"The lab needs the programs {', '.join(absent)}; apt-get install iproute2 util-linux mount."
    for feature, command in _PROBES:
        complaint = _complaint(command)
        if complaint is not None:
            return f"The lab needs {feature}, and the kernel says: {complaint}; load the module or allow it here."
    return _missing_controller()


def hierarchy() -> Hierarchy:
    """Returns where CPU quotas are set on this machine, or raises `LabError` with what is missing."""
    problem = missing()
    cgroups = find_hierarchy() if problem is None else None
    if cgroups is None:
        raise LabError(f"cannot build an emulated cluster here. {problem} See `evenly lab check`.")
    return cgroups


def _missing_controller() -> str | None:
    cgroups = find_hierarchy()
    if cgroups is None:
        return "The lab needs the cgroup cpu controller, and none is mounted; mount cgroup2 on /sys/fs/cgroup."
    if not os.access(cgroups.cpu, os.W_OK):
        return f"The lab needs to write to {cgroups.cpu}, and it is mounted read-only; run outside the container."
    try:
        enable(cgroups)
    except LabError:
        return f"The lab needs CPU quotas below {cgroups.cpu}, and they cannot be enabled; run outside the container."
    return None


def _complaint(command: str) -> str | None:
    arguments = ("unshare", "--net", "--uts", "--mount", "sh", "-c", command)
    done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return " ".join(done.stderr.split()) or f"exit code {done.returncode}"
