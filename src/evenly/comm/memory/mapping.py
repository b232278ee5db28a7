"""Memory that the ranks of a group share: who makes it, how the others map it, and what lies where.

The memory has no name in any folder: it is reached through the process that made it, by processes of the same user
only, and it is gone when the last process that maps it is.
"""

import ctypes
import fcntl
import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass

import torch

from evenly.comm.memory.cuda_runtime import register_host_memory, unregister_host_memory
from evenly.comm.memory.semaphores import SIZE_BYTES, Semaphores

HEADER_WORDS = 4  # of 8 bytes: what a rank has put into a slot
_LINE_BYTES = 4096
_PHASES = 3  # semaphores of each rank in each slot


@dataclass(frozen=True)
class Shape:
    """How the memory of a group is divided."""

    num_ranks: int
    num_slots: int
    slot_bytes: int  # of each rank in each slot

    @property
    def num_semaphores(self) -> int:
        """Of all ranks."""
        return self.num_slots * _PHASES * self.num_ranks

    @property
    def headers_at(self) -> int:
        """Where the headers begin."""
        return 64 + self.num_semaphores * SIZE_BYTES

    @property
    def counts_at(self) -> int:
        """The number of the word after the headers; from here each rank has four words to count its rounds."""
        return HEADER_WORDS * self.num_slots * self.num_ranks

    @property
    def num_words(self) -> int:
        """Of headers and counts, of 8 bytes each."""
        return self.counts_at + 4 * self.num_ranks

    @property
    def data_at(self) -> int:
        """Where the slots begin."""
        end = self.headers_at + 8 * self.num_words
        return -(-end // _LINE_BYTES) * _LINE_BYTES

    @property
    def size_bytes(self) -> int:
        """Of all."""
        return self.data_at + self.num_slots * self.num_ranks * self.slot_bytes

    def semaphore(self, slot: int, phase: int, rank: int) -> int:
        """Returns the number of the semaphore that `rank` takes in a phase of a slot."""
        return (slot * _PHASES + phase) * self.num_ranks + rank

    def header(self, slot: int, rank: int) -> int:
        """Returns the number of the first word of a header."""
        return HEADER_WORDS * (slot * self.num_ranks + rank)


class SharedFile:
    """Memory as a file without a name, until all ranks have mapped it."""

    def __init__(self, size_bytes: int) -> None:
        self.descriptor = os.memfd_create("evenly", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.descriptor, 0o600)
            os.ftruncate(self.descriptor, size_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        except OSError:
            self.close()
            raise

    @property
    def path(self) -> str:
        """Where other processes of this user open it, as long as it is not closed here."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def close(self) -> None:
        """Closes the file; the memory stays where it is mapped."""
        with suppress(OSError):
            os.close(self.descriptor)


def open_shared(path: str, size_bytes: int) -> int:
    """Returns a descriptor of another process's `SharedFile`; `OSError` if it cannot be opened or is another file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if status.st_size != size_bytes or status.st_uid != os.getuid():
        os.close(descriptor)
        raise OSError(f"{path} has {status.st_size} bytes of user {status.st_uid}, not {size_bytes} of {os.getuid()}")
    return descriptor


_maps: "weakref.WeakSet[MappedMemory]" = weakref.WeakSet()
_kept: list["MappedMemory"] = []


def _keep_in_child() -> None:
    """In a forked process the addresses may belong to something else: they must never be given back there."""
    _kept.extend(_maps)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_in_child)


class MappedMemory:
    """The memory of a group as this process has mapped it."""

    def __init__(self, descriptor: int, shape: Shape, *, spin_s: float) -> None:
        self.shape = shape
        self._map = mmap.mmap(descriptor, shape.size_bytes)
        _maps.add(self)
        if hasattr(mmap, "MADV_DONTFORK"):
            self._map.madvise(mmap.MADV_DONTFORK)  # loader workers that outlive a rank would hold the memory
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.token = memoryview(self._map)[:64]
        self.semaphores = Semaphores(address + 64, spin_s=spin_s)
        self.headers = memoryview(self._map)[shape.headers_at : shape.headers_at + 8 * shape.num_words].cast("q")
        self._address = address
        self._unregister: weakref.finalize[..., MappedMemory] | None = None
        data = torch.frombuffer(self._map, dtype=torch.uint8, offset=shape.data_at)
        self.slots = data.view(shape.num_slots, shape.num_ranks, shape.slot_bytes)

    def register(self, device: torch.device) -> None:
        """Lets a CUDA device copy from and to the slots by itself; `OSError` if the driver refuses it."""
        start = self._address + self.shape.data_at
        register_host_memory(start, self.shape.size_bytes - self.shape.data_at, device)
        self._unregister = weakref.finalize(self, unregister_host_memory, start)
        self._unregister.atexit = False

    def unregister(self) -> None:
        """Ends what `register` began; the end of this object does, too."""
        if self._unregister is not None:
            self._unregister()
