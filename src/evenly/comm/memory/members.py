"""Whether the processes of the other ranks still live, seen without their help."""

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Absence:
    """The ranks that a wait lasts for: those that have not come, and of all of them the ended and stopped ones."""

    late: Sequence[int]
    ended: Sequence[int]
    stopped: Sequence[int]


class Processes:
    """The processes of ranks, all on this machine."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._poll = select.poll()
        self._members: dict[int, int] = {}  # by the descriptor of the process
        self._gone: list[int] = []  # whose process had ended before
        for member, pid in enumerate(pids):
            if pid == os.getpid():  # this rank, or one that is a thread of the same process
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone.append(member)
            except (OSError, AttributeError):  # an old kernel, or no access: heartbeats must do
                continue
            else:
                self._members[descriptor] = member
                self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> list[int]:
        """Returns the members whose process has ended, also if its parent has not noticed yet."""
        return sorted([*self._gone, *(self._members[descriptor] for descriptor, _ in self._poll.poll(0))])

    def stopped(self) -> list[int]:
        """Returns the members whose process is stopped, by SIGSTOP or a debugger."""
        return [member for member in self._members.values() if _state(self._pids[member]) in "Tt"]

    def close(self) -> None:
        """Frees the descriptors."""
        descriptors, self._members, self._poll = self._members, {}, select.poll()
        for descriptor in descriptors:
            os.close(descriptor)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "-"
