"""Ends periods that are counted in seconds, on all ranks of a node after the same step."""

import time

import torch
import torch.distributed as dist

from evenly.comm import CollectiveWaiter, Work, broadcast, close_groups


class PeriodTimer:
    """Expires once `seconds` have passed by the clock of the node's first rank.

    That rank broadcasts its answer after a step; the others read it after the next step, so that nobody waits.
    """

    def __init__(self, seconds: float, group: dist.ProcessGroup) -> None:
        self._seconds, self._group = seconds, group
        self._answer: tuple[torch.Tensor, Work] | None = None
        self._unread: tuple[torch.Tensor, Work] | None = None  # of the former period
        self.restart()

    def restart(self) -> None:
        """Starts the next period now; all ranks of the node call it between the same steps."""
        self._unread, self._answer = self._answer or self._unread, None
        self._until = time.monotonic() + self._seconds

    def has_expired(self, waiter: CollectiveWaiter) -> bool:
        """Returns whether the period is over; all ranks of the node call it after each step."""
        is_over = time.monotonic() >= self._until
        if self._group.size() == 1:
            return is_over
        if self._unread is not None:
            waiter.wait([self._unread[1]])
            self._unread = None
        is_expired = False
        if self._answer is not None:
            answer, work = self._answer
            waiter.wait([work])
            is_expired = bool(answer)
        if is_expired:
            self._answer = None
            return True
        flag = torch.tensor([float(is_over)])
        self._answer = (flag, broadcast(flag, self._group, source=0))
        return False

    def close(self, *, failed: bool) -> None:
        """Shuts the node's group down."""
        close_groups([self._group], failed=failed)
