"""Whether the processes of the other ranks still live, seen without their help."""

import os
import select
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Absence:
    """Whom a wait lasts for: ranks that have not come, of these the ended or closed ones, and all stopped ones."""

    late: Sequence[int]
    gone: Sequence[int]
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
        self._close = weakref.finalize(self, _close_all, self._members)

    def ended(self) -> list[int]:
        """Returns the members whose process has ended, also if its parent has not noticed yet."""
        ready = [self._members.get(descriptor) for descriptor, _ in self._poll.poll(0)]
        return sorted([*self._gone, *(member for member in ready if member is not None)])

    def stopped(self) -> list[int]:
        """Returns the members whose process is stopped, by SIGSTOP or a debugger."""
        return [member for member in list(self._members.values()) if _state(self._pids[member]) in "Tt"]

    def close(self) -> None:
        """Frees the descriptors; the end of this object does, too."""
        self._poll = select.poll()
        self._close()


def _close_all(members: dict[int, int]) -> None:
    while members:
        descriptor, _ = members.popitem()
        os.close(descriptor)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "-"
