"""Signs of life: every rank counts in the store, and sees which of the others have stopped counting."""

import json
import os
import socket
import time
from collections.abc import Sequence

from evenly.comm.rank_group import RankGroup
from evenly.launch.limits import read_all

INTERVAL_S = 0.5
SILENT_S = 4 * INTERVAL_S  # a rank that gives no sign for so long is named where something else went wrong
ENDED = "ended"


class AwakeClock:
    """Counts seconds in which this process ran: those in which it was stopped are no wait for others."""

    def __init__(self, *, longest_gap_s: float = 1.0) -> None:
        self.seconds = 0.0
        self._longest_gap_s, self._at = longest_gap_s, time.monotonic()

    def read(self) -> float:
        """Returns the seconds until now; called often, it leaves out only gaps."""
        now = time.monotonic()
        self.seconds += min(now - self._at, self._longest_gap_s)
        self._at = now
        return self.seconds


def identity() -> str:
    """Returns where this process runs."""
    return json.dumps([socket.gethostname(), os.getpid()])


class Heartbeats:
    """The signs of life of all ranks of a party, as one rank sees them."""

    def __init__(self, rank_group: RankGroup) -> None:
        self._party = rank_group
        self._places: list[tuple[str, int]] = []  # host and process id of each rank
        self._beat = 0
        self._seen: list[bytes] = []
        self._changed_s: list[float] = []  # by `_clock`: when each rank last gave a sign
        self._every_s = INTERVAL_S * max(
            1.0, rank_group.size / 32
        )  # the store answers as many keys a second in large runs
        self._clock = AwakeClock(longest_gap_s=2 * self._every_s)
        self._sampled_s = 0.0

    def learn(self, identities: Sequence[bytes]) -> None:
        """Notes who the ranks are; all of them have given a sign of life before."""
        self._places = [(host, int(pid)) for host, pid in map(json.loads, identities)]
        self._seen, self._changed_s = [b""] * self._party.size, [self._clock.read()] * self._party.size
        host = self._party.store_rank
        if host is not None:
            self._party.store.name_host(self.who(host))

    def who(self, rank: int) -> str:
        """Returns a rank with its host and process id, as far as they are known."""
        if not self._places:
            return f"rank {rank}"
        host, pid = self._places[rank]
        return f"rank {rank} on {host} (pid {pid})"

    def beat(self, value: str = "") -> None:
        """Gives a sign of life; a direct call of the store."""
        self._beat += 1
        self._party.store.raw.set(f"beat/{self._party.rank}", value or str(self._beat))

    def sample(self) -> None:
        """Looks at the other ranks' signs if it is time to; a direct call of the store."""
        now_s = self._clock.read()
        if not self._places or (now_s - self._sampled_s < 0.9 * self._every_s and self._sampled_s):
            return
        self._sampled_s = now_s
        values = read_all(self._party.store.raw, [f"beat/{rank}" for rank in range(self._party.size)])
        for rank, value in enumerate(values):
            if value != self._seen[rank] or value == ENDED.encode():
                self._seen[rank], self._changed_s[rank] = value, now_s

    def has_ended(self, rank: int) -> bool:
        """Whether a rank has said that it needs the others no more."""
        return bool(self._seen) and self._seen[rank] == ENDED.encode()

    def silent(self, *, least_s: float = SILENT_S) -> dict[int, float]:
        """Returns the other ranks that have given no sign for at least `least_s` seconds, and for how long."""
        now_s, least_s = self._sampled_s, max(least_s, 2 * self._every_s)
        silences = {rank: now_s - changed_s for rank, changed_s in enumerate(self._changed_s)}
        return {rank: s for rank, s in silences.items() if s >= least_s and rank != self._party.rank}
