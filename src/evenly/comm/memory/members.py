"""Whether the processes of the other ranks still live, seen without their help."""

import os
import select
from collections.abc import Sequence
from pathlib import Path


class Processes:
    """The processes of the ranks of a group, all on this machine."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._poll = select.poll()
        self._descriptors: dict[int, int] = {}  # the process of each
        self._gone: list[int] = []  # processes that had ended before
        for pid in pids:
            if pid == os.getpid():  # this rank, or one that is a thread of the same process
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone.append(pid)
            except (OSError, AttributeError):  # an old kernel, or no access: heartbeats must do
                continue
            else:
                self._descriptors[descriptor] = pid
                self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> list[int]:
        """Returns the ids of processes that have ended, also if their parents have not noticed yet."""
        return sorted([*self._gone, *(self._descriptors[descriptor] for descriptor, _ in self._poll.poll(0))])

    def stopped(self) -> list[int]:
        """Returns the ids of processes that are stopped, by SIGSTOP or a debugger."""
        return [pid for pid in self._descriptors.values() if _state(pid) in "Tt"]

    def close(self) -> None:
        """Frees the descriptors."""
        descriptors, self._descriptors, self._poll = self._descriptors, {}, select.poll()
        for descriptor in descriptors:
            os.close(descriptor)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "-"
