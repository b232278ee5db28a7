"""Every rank on cores of its own: `--bind`. No torch, whose threads must begin after the binding."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from evenly.errors import LaunchError
from evenly.launch.launchers.place import Place
from evenly.launch.settings import environment

TOGETHER = "EVENLY_ONE_MACHINE"  # set by `evenly launch` where all ranks, of all nodes, run on this machine
BOUND = "EVENLY_BOUND"  # the process that `evenly launch --bind` has bound already
_TOPOLOGY = Path("/sys/devices/system/cpu")


def require_binding() -> None:
    """Raises `LaunchError` on a system that cannot bind a process to cores."""
    if not hasattr(os, "sched_setaffinity"):
        raise LaunchError(
            f"--bind was given; {sys.platform} has no call that binds a process to cores, as Linux has. Leave it out."
        )


def bind_rank(place: Place) -> tuple[int, ...]:
    """Binds this process, and the threads and processes that it starts from now on, to cores of its own.

    The cores that the process may use are divided among the ranks of its machine. Cores that srun, or `evenly launch`,
    has bound the process to are its own already and stay. Returns the cores.
    """
    require_binding()
    allowed = os.sched_getaffinity(0)
    is_bound_by_srun = place.launcher == "slurm" and environment("SLURM_CPU_BIND_TYPE") not in (None, "", "none")
    if is_bound_by_srun or environment(BOUND) == str(os.getpid()):
        return tuple(sorted(allowed))
    index, count = _index_on_machine(place)
    cores = share_of_cores(_physical_cores(allowed), index=index, count=count)
    os.sched_setaffinity(0, cores)
    return cores


def share_of_cores(physical_cores: Sequence[Sequence[int]], *, index: int, count: int) -> tuple[int, ...]:
    """Returns the cores of rank `index` of `count`: a run of neighbours; with more ranks than cores, one in turn.

    A physical core, given by the hardware threads it has, belongs to one rank as long as there are enough of them.

    >>> share_of_cores([[0, 4], [1, 5], [2, 6]], index=1, count=2)
    (1, 2, 5, 6)
    >>> share_of_cores([[0], [1]], index=2, count=3)
    (0,)
    """
    threads = [thread for core in physical_cores for thread in core]
    if count > len(threads):
        return (threads[index % len(threads)],)
    pieces = physical_cores if count <= len(physical_cores) else [[thread] for thread in threads]
    mine = pieces[len(pieces) * index // count : len(pieces) * (index + 1) // count]
    return tuple(sorted(thread for piece in mine for thread in piece))


def _index_on_machine(place: Place) -> tuple[int, int]:
    """Returns the number of this rank among those of its machine, and how many there are."""
    if place.world_size == 1:
        return 0, 1
    if environment(TOGETHER):
        return place.rank, place.world_size
    if place.local_size is None:
        raise LaunchError(
            f"--bind was given to rank {place.rank}; its launcher ({place.launcher}) does not tell how many ranks this "
            "machine has. Let the launcher bind them, or start them by evenly launch --bind."
        )
    return place.local_rank, place.local_size


def _physical_cores(allowed: set[int]) -> list[list[int]]:
    """Returns the allowed hardware threads of each physical core, neighbours in the machine beside each other."""
    cores: dict[tuple[int, int], list[int]] = {}
    for thread in sorted(allowed):
        cores.setdefault(_place_in_machine(thread), []).append(thread)
    return [cores[key] for key in sorted(cores)]


def _place_in_machine(thread: int) -> tuple[int, int]:
    """Returns package and core of a hardware thread; one that the system does not describe is a core of its own."""
    folder = _TOPOLOGY / f"cpu{thread}" / "topology"
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return sys.maxsize, thread
