"""Groups between the nodes of an elastic run: opened for one generation of nodes, left at once if one of them is lost.

Gloo cannot cancel a collective. A rank that is to give up an exchange stops waiting for it and leaves the group to a
thread, which frees it once its collectives have failed or timed out.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch.distributed as dist

from evenly._torch.process_groups import Store, free_in_background
from evenly.comm.callbacks import call_when_done
from evenly.comm.collectives import CollectiveWaiter, Work, first_line
from evenly.comm.failure_monitor import FailureMonitor
from evenly.comm.groups import GroupsAcrossNodes, Peers, open_group, owners_of_slices
from evenly.comm.memory.group import MemoryWork
from evenly.comm.rank_group import RankGroup
from evenly.errors import EvenlyError
from evenly.launch.limits import BoundedStore, NoAnswerError, call_within

POLL_S = 0.02  # how often a rank that waits for other nodes looks whether the exchange is given up


class RoundAbortedError(Exception):
    """An exchange between nodes is given up: one of them is lost, or has voted against it. It is tried again."""


class SharedValues(Protocol):
    """Values that the ranks of a generation of nodes write and read, with the calls of a coordinator's client."""

    def put(self, generation: str, key: str, value: bytes) -> None:
        """Writes a value."""

    def get(self, generation: str, key: str, *, timeout_s: float) -> bytes:
        """Returns a value, once it is there."""


class GenerationStore(Store):
    """The store in which the ranks of one generation find each other's addresses."""

    def __init__(self, values: SharedValues, generation: str, *, timeout_s: float) -> None:
        super().__init__()
        self._values = values
        self._generation = generation
        self._timeout_s = timeout_s
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch passes bytes
        """Writes a value."""
        self._values.put(self._generation, key, bytes(value))

    def get(self, key: str) -> bytes:
        """Returns a value, once it is there."""
        if key not in self._known:
            self._known[key] = self._values.get(self._generation, key, timeout_s=self._timeout_s)
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """Returns when all keys are there."""
        for key in keys:
            self.get(key)


class RoundWaiter(CollectiveWaiter):
    """Waits for collectives between nodes; raises `RoundAbortedError` as soon as the exchange is given up."""

    def __init__(
        self, monitor: FailureMonitor, *, label: str, step: int, timeout_s: float, why_aborted: Callable[[], str | None]
    ) -> None:
        super().__init__(monitor, label=label, step=step, timeout_s=timeout_s, reports=False)
        self._why_aborted = why_aborted

    def require_alive(self) -> None:
        """Raises if the exchange is given up, or if a rank of this node has failed."""
        self.monitor.check()
        if why := self._why_aborted():
            raise RoundAbortedError(why)

    def _wait(self, works: Iterable[Work], *, waits_for_ranks: bool) -> None:
        for work in works:
            if isinstance(work, MemoryWork):
                raise TypeError("a collective inside a node was waited for as one between nodes")
            done = threading.Event()
            call_when_done(work.get_future(), partial(_set, done))
            waited_s = 0.0
            while not done.wait(POLL_S):
                self.require_alive()
                waited_s += POLL_S
                if waited_s > self.timeout_s:
                    raise RoundAbortedError(f"a transfer between nodes took more than {self.timeout_s:g} s")
            try:
                work.wait()
            except RuntimeError as error:
                self.monitor.check()
                raise RoundAbortedError(f"the connection to another node broke: {first_line(error)}") from error


def _set(done: threading.Event, _: object) -> None:
    done.set()


def open_across(
    values: SharedValues,
    generation: str,
    sizes: Sequence[int],
    *,
    index: int,
    local_rank: int,
    concurrent: bool,
    timeout_s: float,
    check: Callable[[], None],
) -> GroupsAcrossNodes:
    """Returns the groups between nodes of these numbers of ranks; all their ranks call it together.

    Args:
        values: through which ranks find each other.
        generation: the name of this set of nodes, which no other set has had.
        sizes: the number of ranks of each node.
        index: of this rank's node.
        local_rank: of this rank in its node.
        concurrent: whether another thread uses the groups while gradients are averaged.
        timeout_s: the time limit of every collective, and of connecting.
        check: called meanwhile; what it raises ends the wait.

    Raises:
        RoundAbortedError: where ranks cannot connect.
    """
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    nodes = tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
    rank, opened = nodes[index][local_rank], list[dist.ProcessGroup]()
    store = GenerationStore(values, generation, timeout_s=timeout_s)
    ranks = RankGroup(rank, sum(sizes), BoundedStore(store, timeout_s=timeout_s))

    def open_one(name: str, members: Sequence[int]) -> dist.ProcessGroup:
        group = call_within(
            timeout_s + 1.0,
            lambda: open_group(ranks, name, members, backend="gloo", timeout_s=timeout_s, concurrent=concurrent),
            check=check,
        )
        opened.append(group)
        return group

    try:
        peers = []
        for number, owners in enumerate(owners_of_slices(nodes)):
            if rank in owners:
                group = open_one(f"peers{number}", owners)
                peers.append(Peers(owners, group, group))
        world = open_one("world", range(sum(sizes)))
    except (RoundAbortedError, EvenlyError, NoAnswerError, RuntimeError) as error:
        free_in_background(opened)
        if isinstance(error, RoundAbortedError):
            raise
        check()
        raise RoundAbortedError(f"nodes could not connect with each other: {error}") from error
    return GroupsAcrossNodes(nodes, index, rank, world, tuple(peers))


def leave_groups(groups: GroupsAcrossNodes) -> None:
    """Gives up the groups between nodes, whatever is pending in them."""
    free_in_background([groups.world, *(peers.group for peers in groups.peers)])
