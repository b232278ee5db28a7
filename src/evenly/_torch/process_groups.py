"""Process groups and stores of torch.distributed outside of its registry, and the settings of gloo.

Written for torch 2.11 and 2.13; `torch.distributed.new_group` and torch's tests make groups with the same calls. The
stores and `GradBucket` are public in torch.distributed, which does not export them for type checkers.
"""

import ctypes
from collections.abc import Sequence
from datetime import timedelta
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
    "gloo",
    "gloo_devices",
    "keep_for_ever",
    "make_recorder",
    "nccl",
]

GlooDevice = ProcessGroupGloo.Device


def default_store() -> Store:
    """Returns the store behind torch's default process group; there is no public way to it."""
    return distributed_c10d._get_default_store()


def nccl(store: PrefixStore, rank: int, size: int, *, timeout: timedelta) -> Backend:
    """Returns what a group of NCCL works with."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # the only way to set it
    return dist.ProcessGroupNCCL(store, rank, size, options)


def gloo(
    store: PrefixStore, rank: int, size: int, *, timeout: timedelta, devices: Sequence[GlooDevice] | None = None
) -> ProcessGroupGloo:
    """Returns what a group of gloo works with: over `devices`, or else over ones of its own."""
    if devices is None:
        return ProcessGroupGloo(store, rank, size, timeout)
    settings = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's annotations lack it
    settings._devices, settings._timeout = list(devices), timeout
    settings._threads = 2 * len(devices)  # as torch does it
    return ProcessGroupGloo(store, rank, size, settings)


def gloo_devices(timeout: timedelta) -> list[GlooDevice]:
    """Returns fresh ends of gloo's wires, at the interfaces that torch chooses, for several groups to share."""
    engine: Any = ProcessGroupGloo(HashStore(), 0, 1, timeout)  # it knows the interfaces
    return list(engine.options._devices)


def add_backend(
    group: dist.ProcessGroup, engine: Backend, kind: dist.ProcessGroup.BackendType, *, devices: Sequence[str]
) -> None:
    """Has `engine` work for a fresh group, on these kinds of devices."""
    group._set_default_backend(kind)
    engine._set_sequence_number_for_group()
    for device in devices:
        group._register_backend(torch.device(device), kind, engine)


def backend_name(group: dist.ProcessGroup, device: str) -> str:
    """Returns the name of what works for a kind of device in a group; torch's own way needs a registered group."""
    return str(group._get_backend(torch.device(device)).name())


def keep_for_ever(group: dist.ProcessGroup) -> None:
    """Keeps a group alive until the process ends, by a reference that nobody gives back.

    Gloo cannot end a work that waits for another rank, and freeing its group waits for it: at the end of a process
    that would be as long as the timeout. A reference from Python would be given back at the end of the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def make_recorder() -> None:
    """Has torch make its flight recorder of gloo's collectives now; it reads its size from the environment then."""
    c10d._dump_fr_trace_json()  # type: ignore[attr-defined]  # torch's annotations lack it
