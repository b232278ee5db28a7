"""Gathers values of all ranks through the store, for a background thread, which must not call collectives."""

import json
import time
from typing import TypeVar

from evenly.comm.failure_monitor import FailureMonitor
from evenly.comm.heartbeats import AwakeClock
from evenly.errors import PeerError

T = TypeVar("T")

AFTER_FAILURE_S = 10.0  # once a rank has failed, the others have so long to end what they began together
SHORTEST_POLL_S, LONGEST_POLL_S = 0.002, 0.1


class StoreGatherer:
    """Gathers values of all ranks through the store that they share; all ranks make the same calls in one order."""

    def __init__(self, monitor: FailureMonitor, *, timeout_s: float) -> None:
        self._monitor = monitor
        self._rank_group = monitor.rank_group.scoped("gathered")
        self._timeout_s = timeout_s
        self._number = 0

    def gather(self, value: T, what: str) -> list[T]:
        """Returns every rank's `value`, which must be JSON; tuples become lists. `what` is in errors.

        Raises:
            PeerError: a rank is gone, or did not come within the time limit.
        """
        store, rank = self._rank_group.store, self._rank_group.rank
        self._number += 1
        keys = self._keys(self._number)
        store.set(keys[rank], json.dumps(value))
        self._wait(keys, what)
        rows = [json.loads(content) for content in store.get_all(keys)]
        if self._number > 1:  # every rank has come here, so all have read the values before
            store.delete(self._keys(self._number - 1)[rank])
        return rows

    def _keys(self, number: int) -> list[str]:
        return [f"{number}/{rank}" for rank in range(self._rank_group.size)]

    def _wait(self, keys: list[str], what: str) -> None:
        store = self._rank_group.store
        clock, failed_at_s, pause_s = AwakeClock(), float("inf"), SHORTEST_POLL_S
        while not store.check(keys):
            waited_s = clock.read()
            if self._monitor.has_failed or self._monitor.has_error:
                failed_at_s = min(failed_at_s, waited_s)
                if (missing := self._monitor.missing()) is not None:
                    raise missing
            if waited_s > min(self._timeout_s, failed_at_s + AFTER_FAILURE_S):
                absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise PeerError(
                    f"rank {self._rank_group.rank} waited {waited_s:.0f} s for the other ranks to {what}, but ranks "
                    f"{absent} did not ({self._monitor.who(absent)}). Look at their output; for a slow disk give a "
                    "larger timeout_s."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
