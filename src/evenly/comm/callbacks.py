"""Python callbacks of collectives, and the end of a process in which some have not run."""

import atexit
import os
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from evenly._torch.process_exit import let_threads_wait_instead_of_abort
from evenly._torch.process_groups import keep_until_exit

EXIT_S = 1.0  # how long the end of a process waits for callbacks
SETTLE_S = 0.05  # until a thread that has freed its callback is back in gloo
POLL_S = 0.01


class _Callback:
    """A callback that lives as long as torch may call it."""

    __slots__ = ("__weakref__", "_act")

    def __init__(self, act: Callable[[torch.futures.Future[Any]], None]) -> None:
        self._act = act

    def __call__(self, future: torch.futures.Future[Any]) -> None:
        self._act(future)


class _ExitGuard:
    """What this process has pending, and what is done about it at its end."""

    def __init__(self, pid: int) -> None:
        self.callbacks: weakref.WeakSet[_Callback] = weakref.WeakSet()
        self.groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._pid = pid
        atexit.register(self._end)

    def _end(self) -> None:
        """Waits for callbacks; if some remain, because their peers hang, their groups and threads are left alone."""
        if os.getpid() != self._pid or not self.callbacks:  # a forked process has none of the threads
            return
        deadline = time.monotonic() + EXIT_S
        while self.callbacks and time.monotonic() < deadline:
            time.sleep(POLL_S)
        time.sleep(SETTLE_S)
        if self.callbacks:
            for group in list(self.groups):
                keep_until_exit(group)  # its destructor would wait for the collective
            let_threads_wait_instead_of_abort()


@cache
def _exit_guard(pid: int) -> _ExitGuard:
    return _ExitGuard(pid)


def call_when_done(future: torch.futures.Future[Any], act: Callable[[torch.futures.Future[Any]], None]) -> None:
    """Calls `act` with the future of a collective once it is done, in a thread of the backend.

    Python cannot end while such a thread calls it: the process would be aborted. Its end waits for the callbacks.
    """
    callback = _Callback(act)
    _exit_guard(os.getpid()).callbacks.add(callback)
    future.add_done_callback(callback)


def watch_group(group: dist.ProcessGroup) -> None:
    """Keeps a gloo group from being destroyed at the end of the process if collectives are pending then."""
    _exit_guard(os.getpid()).groups.add(group)
