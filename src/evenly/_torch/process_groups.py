"""Process groups and stores of torch.distributed outside of its registry, and the settings of gloo.

Written for torch 2.11 and 2.13; `torch.distributed.new_group` and torch's tests create groups with the same calls. The
stores and `GradBucket` are public in torch.distributed, which does not export them for type checkers.
"""

import atexit
import ctypes
import gc
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import (
    Backend,
    FileStore,
    GradBucket,
    HashStore,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)
from torch.distributed import distributed_c10d

from evenly._torch.process_exit import let_threads_wait_instead_of_abort

__all__ = [
    "Backend",
    "FileStore",
    "GlooDevice",
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "add_backend",
    "backend_name",
    "default_store",
    "free_in_background",
    "gloo",
    "gloo_devices",
    "keep_until_exit",
    "make_recorder",
    "nccl",
    "num_registered_groups",
]

GlooDevice = ProcessGroupGloo.Device

WAITS_BEFORE_COLLECTION = 10  # of 0.05 s
FREEING_S = 1.0  # how long the end of a process waits for groups to be freed


def default_store() -> Store:
    """Returns the store of torch's default process group; it has no public access."""
    return distributed_c10d._get_default_store()


def num_registered_groups() -> int:
    """Returns how many groups torch's registry has, the default one included; it has no public access."""
    return len(distributed_c10d._world.pg_map)


def nccl(store: PrefixStore, rank: int, size: int, *, timeout: timedelta) -> Backend:
    """Returns an NCCL backend for a process group."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # the only way to set it
    return dist.ProcessGroupNCCL(store, rank, size, options)


def gloo(
    store: PrefixStore, rank: int, size: int, *, timeout: timedelta, devices: Sequence[GlooDevice] | None = None
) -> ProcessGroupGloo:
    """Returns a gloo backend for a process group, over `devices`, or over new ones."""
    if devices is None:
        return ProcessGroupGloo(store, rank, size, timeout)
    settings = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's annotations lack it
    settings._devices, settings._timeout = list(devices), timeout
    settings._threads = 2 * len(devices)  # as in torch
    return ProcessGroupGloo(store, rank, size, settings)


def gloo_devices(timeout: timedelta) -> list[GlooDevice]:
    """Returns new gloo devices, at the network interfaces that torch chooses, for several groups to share."""
    backend: Any = ProcessGroupGloo(HashStore(), 0, 1, timeout)  # it selects the interfaces
    return list(backend.options._devices)


def add_backend(
    group: dist.ProcessGroup, backend: Backend, kind: dist.ProcessGroup.BackendType, *, devices: Sequence[str]
) -> None:
    """Registers `backend` with a new group, for these device types."""
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    for device in devices:
        group._register_backend(torch.device(device), kind, backend)


def backend_name(group: dist.ProcessGroup, device: str) -> str:
    """Returns the name of a group's backend for a device type; torch's public function needs a registered group."""
    return str(group._get_backend(torch.device(device)).name())


def keep_until_exit(group: dist.ProcessGroup) -> None:
    """Keeps a group alive until the process ends, by a reference that is never released.

    Gloo cannot abort a work that waits for another rank, and the destructor of its group waits for the work: the end of
    a process could take as long as the timeout. Python would release an ordinary reference at the end of the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def free_in_background(groups: Sequence[dist.ProcessGroup]) -> None:
    """Frees groups, once nothing else refers to them, in a thread of its own.

    Gloo cannot abort a work that waits for another rank, and the destructor of its group waits for the work, until the
    connection breaks or the timeout is over. It must run in no thread that has other things to do: this one keeps its
    references until they are the last. The end of the process waits shortly for it, see `process_exit`.
    """
    if groups:
        thread = threading.Thread(target=_free, args=(list(groups),), name="evenly-freed-groups", daemon=True)
        _freeing().add(thread)
        thread.start()


def _free(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        group = groups.pop()
        waits = 0
        while sys.getrefcount(group) > 2:  # this variable and the argument of the call
            if _is_ending.wait(0.05):
                break
            waits += 1
            if waits == WAITS_BEFORE_COLLECTION:
                gc.collect()  # circles of objects may refer to it
        if _is_ending.is_set():
            for kept in (group, *groups):
                keep_until_exit(kept)
            return
        del group
    _freeing().discard(threading.current_thread())


_is_ending = threading.Event()


@cache
def _freeing() -> set[threading.Thread]:
    """Returns the threads that free groups."""
    atexit.register(_end_freeing)
    return set()


def _end_freeing() -> None:
    """Lets the threads end: one that is in a destructor when Python is gone would abort the process."""
    _is_ending.set()
    deadline = time.monotonic() + FREEING_S
    for thread in list(_freeing()):
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in list(_freeing())):
        let_threads_wait_instead_of_abort()


def make_recorder() -> None:
    """Makes torch create its flight recorder of gloo's collectives now; its size is read from the environment."""
    c10d._dump_fr_trace_json()  # type: ignore[attr-defined]  # torch's annotations lack it
