"""The end of a period that is counted in seconds, heard by all ranks of a node after the same step."""

import time

import torch
import torch.distributed as dist

from evenly.comm import CollectiveWaiter, broadcast, close_groups


class PeriodTimer:
    """Rings once `seconds` have passed by the clock of the node's first rank.

    What that rank's clock says after a step is heard after the next one, so that nobody waits for it.
    """

    def __init__(self, seconds: float, group: dist.ProcessGroup) -> None:
        self._seconds, self._group = seconds, group
        self._told: tuple[torch.Tensor, dist.Work] | None = None
        self._unheard: tuple[torch.Tensor, dist.Work] | None = None  # kept until it has arrived
        self.wind()

    def wind(self) -> None:
        """Lets the next period begin now; all ranks of the node call it between the same steps."""
        self._unheard, self._told = self._told or self._unheard, None
        self._until = time.monotonic() + self._seconds

    def rings(self, waiter: CollectiveWaiter) -> bool:
        """Returns whether the period is over; all ranks of the node call it after each step."""
        is_over = time.monotonic() >= self._until
        if self._group.size() == 1:
            return is_over
        if self._unheard is not None:
            waiter.wait([self._unheard[1]])
            self._unheard = None
        heard = False
        if self._told is not None:
            answer, work = self._told
            waiter.wait([work])
            heard = bool(answer)
        if heard:
            self._told = None
            return True
        flag = torch.tensor([float(is_over)])
        self._told = (flag, broadcast(flag, self._group, source=0))
        return False

    def close(self, *, failed: bool) -> None:
        """Shuts the node's group down."""
        close_groups([self._group], failed=failed)
