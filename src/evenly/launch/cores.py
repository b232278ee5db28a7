"""Which cores this process may use, and how much of them."""

import os
from pathlib import Path

_CGROUP = Path("/proc/self/cgroup")
_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu"))


def usable_cores() -> list[int]:
    """Returns the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_quota() -> float:
    """Returns the cores' worth of time that this process may use; that of all cores without a quota."""
    return min([float(os.cpu_count() or 1), *_quotas()])


def _quotas() -> list[float]:
    """Returns the CPU quotas of this process's control groups and those around them, as far as they can be read."""
    try:
        lines = _CGROUP.read_text().splitlines()
    except OSError:
        return []
    quotas = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for root in _ROOTS:
            folder = root / name.lstrip("/")
            for level in (folder, *folder.parents):
                quotas += _quota(level)
                if level == root:
                    break
    return quotas


def _quota(folder: Path) -> list[float]:
    try:  # version 2
        quota, period = (folder / "cpu.max").read_text().split()
        return [] if quota == "max" else [int(quota) / int(period)]
    except (OSError, ValueError):
        pass
    try:  # version 1
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return [] if quota_us <= 0 else [quota_us / int((folder / "cpu.cfs_period_us").read_text())]
    except (OSError, ValueError):
        return []
