"""Semaphores of POSIX in shared memory: how ranks of one machine tell each other that their data are there.

What a rank wrote before it posts a semaphore is seen by the rank that takes it, on every processor. A rank that waits
sleeps in the kernel; where it may, it first tries for a moment, which is quicker than to be woken.
"""

import ctypes
import time
from functools import cache

SIZE_BYTES = 64  # a semaphore of glibc has 32; one cache line each
_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]  # the form of ctypes


class _Calls:
    """The functions of the C library; those that never wait keep Python's lock, which is faster."""

    def __init__(self) -> None:
        brief, library = ctypes.PyDLL(None), ctypes.CDLL(None)
        self.init = brief.sem_init
        self.post = brief.sem_post
        self.try_take = brief.sem_trywait
        self.init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        self.post.argtypes = self.try_take.argtypes = [ctypes.c_void_p]
        self.yield_ = library.sched_yield  # other threads of this process may run Python meanwhile
        self.is_monotonic = hasattr(library, "sem_clockwait")  # glibc 2.30 or newer
        self.take = library.sem_clockwait if self.is_monotonic else library.sem_timedwait
        clock = [ctypes.c_int] if self.is_monotonic else []
        self.take.argtypes = [ctypes.c_void_p, *clock, ctypes.POINTER(_Timespec)]


@cache
def _calls() -> _Calls:
    return _Calls()


def are_available() -> bool:
    """Whether the C library of this machine has semaphores that processes can share."""
    try:
        return bool(_calls())
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no library of the process
        return False


class Semaphores:
    """An array of semaphores that begins at an address of this process."""

    def __init__(self, address: int, *, spin_s: float) -> None:
        self._address = address
        self._spin_s = spin_s
        self._calls = _calls()

    def create(self, count: int) -> None:
        """Makes the semaphores, all at 0; one process does so, before the others use them."""
        for index in range(count):
            if self._calls.init(self._address + index * SIZE_BYTES, 1, 0):
                raise OSError("a semaphore for several processes was asked for, and the system has none.")

    def post(self, index: int) -> None:
        """Adds 1."""
        self._calls.post(self._address + index * SIZE_BYTES)

    def try_take(self, index: int) -> bool:
        """Takes 1 if it is there."""
        return not self._calls.try_take(self._address + index * SIZE_BYTES)

    def take(self, index: int, *, limit_s: float) -> bool:
        """Takes 1, once it is there; returns False after `limit_s` seconds, or earlier if a signal came."""
        address, calls = self._address + index * SIZE_BYTES, self._calls
        if not calls.try_take(address):
            return True
        if self._spin_s > 0:
            until = time.perf_counter() + self._spin_s
            while time.perf_counter() < until:
                if not calls.try_take(address):
                    return True
                calls.yield_()
        else:
            calls.yield_()  # where ranks share a core, the one that is waited for may run, and nobody has to be woken
            if not calls.try_take(address):
                return True
        now = time.monotonic() if calls.is_monotonic else time.time()
        limit = _Timespec(int(now + limit_s), int((now + limit_s) % 1 * 1e9))
        clock = [_CLOCK_MONOTONIC] if calls.is_monotonic else []
        return not calls.take(address, *clock, ctypes.byref(limit))
