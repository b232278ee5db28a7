"""CPU quotas and core sets through the kernel's control groups, version 1 or 2."""

import math
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evenly.errors import LabError

_PERIOD_US = 4_000  # short, so that training steps do not alternate between fast and throttled ones
_MIN_QUOTA_US = 1_000
_KILL_S = 10.0


@dataclass(frozen=True)
class Hierarchy:
    """Where the controllers are mounted; in version 2 both are the same folder."""

    version: int
    cpu: Path
    cpuset: Path | None

    @property
    def roots(self) -> tuple[Path, ...]:
        """The roots under which a lab has folders, each once."""
        return tuple(dict.fromkeys(root for root in (self.cpu, self.cpuset) if root is not None))


def find_hierarchy(mounts: Path = Path("/proc/self/mounts")) -> Hierarchy | None:
    """Returns where CPU quotas can be set on this machine, None where they cannot."""
    controllers: dict[str, Path] = {}
    for line in mounts.read_text().splitlines():
        _device, mount_point, kind, options, *_rest = line.split()
        if kind == "cgroup2" and "cpu" in _words(Path(mount_point) / "cgroup.controllers"):
            has_cpuset = "cpuset" in _words(Path(mount_point) / "cgroup.controllers")
            return Hierarchy(version=2, cpu=Path(mount_point), cpuset=Path(mount_point) if has_cpuset else None)
        if kind == "cgroup":
            for controller in {"cpu", "cpuset"} & set(options.split(",")):
                controllers.setdefault(controller, Path(mount_point))
    return (
        Hierarchy(version=1, cpu=controllers["cpu"], cpuset=controllers.get("cpuset")) if "cpu" in controllers else None
    )


def quota_us(cores_worth: float) -> tuple[int, int]:
    """Returns quota and period in microseconds; the period grows where the quota would fall below the kernel's 1 ms.

    >>> quota_us(0.35), quota_us(0.1)
    ((1400, 4000), (1000, 10000))
    """
    if cores_worth * _PERIOD_US >= _MIN_QUOTA_US:
        return round(cores_worth * _PERIOD_US), _PERIOD_US
    return _MIN_QUOTA_US, min(math.ceil(_MIN_QUOTA_US / cores_worth), 1_000_000)


def open_lab(hierarchy: Hierarchy, *, lab: str, num_ranks: int) -> None:
    """Makes the folders that hold the groups of one lab's ranks."""
    for root in hierarchy.roots:
        (root / lab).mkdir()
    if hierarchy.version == 2:
        enable(hierarchy)
        # Enabled here too, the controllers cannot be switched off above while the lab exists.
        write(hierarchy.cpu / lab / "cgroup.subtree_control", _controllers(hierarchy))
    elif hierarchy.cpuset is not None:
        for name in ("cpuset.cpus", "cpuset.mems"):
            write(hierarchy.cpuset / lab / name, (hierarchy.cpuset / name).read_text().strip())
    _set_weight(hierarchy, lab=lab, num_ranks=num_ranks)


def enable(hierarchy: Hierarchy) -> None:
    """Lets the groups below the root of a version 2 hierarchy have CPU quotas and core sets."""
    control = hierarchy.cpu / "cgroup.subtree_control"
    if hierarchy.version == 2 and not set(_controllers(hierarchy).replace("+", "").split()) <= _words(control):
        write(control, _controllers(hierarchy))


def open_rank(hierarchy: Hierarchy, *, lab: str, rank: int, cores: str | None) -> tuple[Path, ...]:
    """Makes the group of one rank and returns the files a process joins it by."""
    roots = [hierarchy.cpu]
    if cores is not None:
        if hierarchy.cpuset is None:
            raise LabError(
                f"rank {rank} is to run on cores {cores}, but there is no cpuset controller here. Leave `cores` out."
            )
        roots = list(hierarchy.roots)
    folders = [root / lab / f"rank{rank}" for root in roots]
    for folder in folders:
        folder.mkdir()
    if cores is not None:
        if hierarchy.version == 1:
            write(folders[-1] / "cpuset.mems", (folders[-1].parent / "cpuset.mems").read_text().strip())
        write(folders[-1] / "cpuset.cpus", cores)
    return tuple(folder / "cgroup.procs" for folder in folders)


def set_quota(hierarchy: Hierarchy, *, lab: str, rank: int, cores_worth: float | None) -> None:
    """Sets the CPU quota of a rank from now on, in cores; None for no limit."""
    folder = hierarchy.cpu / lab / f"rank{rank}"
    quota, period = (None, _PERIOD_US) if cores_worth is None else quota_us(cores_worth)
    if hierarchy.version == 2:
        write(folder / "cpu.max", f"{'max' if quota is None else quota} {period}")
        return
    write(folder / "cpu.cfs_period_us", str(period))
    write(folder / "cpu.cfs_quota_us", str(-1 if quota is None else quota))


def kill_rank(hierarchy: Hierarchy, *, lab: str, rank: int) -> None:
    """Ends every process in a rank's group, also those that left its session."""
    _kill_all(hierarchy.cpu / lab / f"rank{rank}")


def labs(hierarchy: Hierarchy) -> set[str]:
    """Returns the names of the groups at the top of the hierarchy."""
    return {entry.name for root in hierarchy.roots for entry in root.iterdir() if entry.is_dir()}


def remove_lab(hierarchy: Hierarchy, *, lab: str) -> None:
    """Ends every process of a lab and removes its groups; what is gone already is no error."""
    for root in hierarchy.roots:
        for folder, _folders, _files in os.walk(root / lab, topdown=False):
            _kill_all(Path(folder))
            _remove(Path(folder))


def write(path: Path, text: str) -> None:
    """Writes to a control file; the kernel may refuse only when the file is closed."""
    try:
        with path.open("w") as file:
            file.write(text)
    except OSError as error:
        raise LabError(
            f"cannot set {path.name} of {path.parent} to {text!r}: {error.strerror}. "
            "Ask for less than the machine has, or give the lab a control group hierarchy it may write."
        ) from None


def _set_weight(hierarchy: Hierarchy, *, lab: str, num_ranks: int) -> None:
    # A group has the weight of one process; a lab should have that of its ranks.
    if hierarchy.version == 2:
        write(hierarchy.cpu / lab / "cpu.weight", str(min(100 * num_ranks, 10_000)))
    else:
        write(hierarchy.cpu / lab / "cpu.shares", str(min(1024 * num_ranks, 262_144)))


def _controllers(hierarchy: Hierarchy) -> str:
    return "+cpu" if hierarchy.cpuset is None else "+cpu +cpuset"


def _words(path: Path) -> set[str]:
    try:
        return set(path.read_text().split())
    except OSError:
        return set()


def _kill_all(folder: Path) -> None:
    deadline = time.monotonic() + _KILL_S
    while pids := _words(folder / "cgroup.procs"):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabError(
                f"cannot end the processes {sorted(pids)} in {folder}: they outlive SIGKILL. End them by hand."
            )
        time.sleep(0.005)


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _KILL_S
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:  # a process that is just ending still counts
            if time.monotonic() > deadline:
                raise LabError(f"cannot remove {folder}: {error.strerror}. Run `evenly lab clean`.") from None
            time.sleep(0.005)
        else:
            return
