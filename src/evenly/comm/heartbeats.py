"""Heartbeats: every rank increments a counter in the store, and sees which of the others have stopped."""

import json
import os
import socket
import time
from collections.abc import Sequence

from evenly.comm.rank_group import RankGroup
from evenly.launch.limits import read_all

INTERVAL_S = 0.5
SILENT_S = 4 * INTERVAL_S  # a rank without a heartbeat for so long is named in errors
ENDED = "ended"


class AwakeClock:
    """Counts the seconds in which this process ran; time in which it was suspended does not count."""

    def __init__(self, *, longest_gap_s: float = 1.0) -> None:
        self.seconds = 0.0
        self._longest_gap_s, self._at = longest_gap_s, time.monotonic()

    def read(self) -> float:
        """Returns the seconds until now; must be called often, because long gaps are left out."""
        now = time.monotonic()
        self.seconds += min(now - self._at, self._longest_gap_s)
        self._at = now
        return self.seconds


def identity() -> str:
    """Returns host and process id of this process, as JSON."""
    return json.dumps([socket.gethostname(), os.getpid()])


class Heartbeats:
    """The heartbeats of all ranks of a group, as seen by one rank."""

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._identities: list[tuple[str, int]] = []  # host and process id of each rank
        self._beat = 0
        self._last_values: list[bytes] = []
        self._changed_s: list[float] = []  # by `_clock`: when each rank last sent a heartbeat
        self._every_s = INTERVAL_S * max(1.0, rank_group.size / 32)  # limits the load of the store in large runs
        self._clock = AwakeClock(longest_gap_s=2 * self._every_s)
        self._sampled_s = 0.0

    def set_identities(self, identities: Sequence[bytes]) -> None:
        """Stores the identities of the ranks, all of which have sent a heartbeat before."""
        self._identities = [(host, int(pid)) for host, pid in map(json.loads, identities)]
        self._last_values, self._changed_s = [b""] * self._rank_group.size, [self._clock.read()] * self._rank_group.size
        host = self._rank_group.store_rank
        if host is not None:
            self._rank_group.store.name_host(self.who(host))

    def who(self, rank: int) -> str:
        """Returns a rank with its host and process id, as far as they are known."""
        if not self._identities:
            return f"rank {rank}"
        host, pid = self._identities[rank]
        return f"rank {rank} on {host} (pid {pid})"

    def beat(self, value: str = "") -> None:
        """Sends a heartbeat; a direct call of the store."""
        self._beat += 1
        self._rank_group.store.raw.set(f"beat/{self._rank_group.rank}", value or str(self._beat))

    def sample(self) -> None:
        """Reads the other ranks' heartbeats if it is time to; a direct call of the store."""
        now_s = self._clock.read()
        if not self._identities or (now_s - self._sampled_s < 0.9 * self._every_s and self._sampled_s):
            return
        self._sampled_s = now_s
        values = read_all(self._rank_group.store.raw, [f"beat/{rank}" for rank in range(self._rank_group.size)])
        for rank, value in enumerate(values):
            if value != self._last_values[rank] or value == ENDED.encode():
                self._last_values[rank], self._changed_s[rank] = value, now_s

    def has_ended(self, rank: int) -> bool:
        """Whether a rank has ended normally."""
        return bool(self._last_values) and self._last_values[rank] == ENDED.encode()

    def silent(self, *, least_s: float = SILENT_S) -> dict[int, float]:
        """Returns the other ranks without a heartbeat for at least `least_s` seconds, and for how long."""
        now_s, least_s = self._sampled_s, max(least_s, 2 * self._every_s)
        silences = {rank: now_s - changed_s for rank, changed_s in enumerate(self._changed_s)}
        return {rank: s for rank, s in silences.items() if s >= least_s and rank != self._rank_group.rank}
