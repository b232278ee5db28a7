"""Which nodes take part in an exchange, and whether it counts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from evenly.comm import CollectiveWaiter, Groups, all_gather
from evenly.coordination.values import JSON, Fields
from evenly.exchange.anchors import Anchors
from evenly.exchange.buffers import Buffers
from evenly.exchange.payload import Payload
from evenly.exchange.payload_builder import PayloadBuilder
from evenly.exchange.pending import ExchangeOutcome, Tensors
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.exchange.state_transfer import JoinState
from evenly.exchange.votes import Quorum, Vote, VoteColumns, require_lockstep, vote_inside

T = TypeVar("T")


class SampleSource(Protocol):
    """Deals the samples of an epoch to the nodes of an elastic run: every sample is trained once."""

    def report(self) -> dict[str, JSON]:
        """Returns what this node tells the others before an exchange."""

    def adopt(self, state: Fields) -> None:
        """Takes over the `state()` of another node."""

    def state(self) -> dict[str, JSON]:
        """Returns which samples are done and who holds which."""

    def commit(
        self, reports: Mapping[str, Fields], *, absent: Collection[str] = (), discarded: Collection[str] = ()
    ) -> None:
        """Follows an exchange that was made by the nodes with these reports."""


@dataclass(frozen=True)
class ExchangeParts:
    """What the exchanges of one network consist of; a membership replaces some of it when nodes come or go."""

    replica_exchange: ReplicaExchange
    payload_builder: PayloadBuilder
    anchors: Anchors
    buffers: Buffers
    capture: Callable[[], object]  # returns the state of optimizer and schedule, nested


class Membership(ABC):
    """Decides before every exchange which nodes take part, and after it whether it counts."""

    is_elastic = False  # nodes may come and go
    received: JoinState | None = None  # what this node takes over from another one with the exchange that is made
    has_waiting = False  # nodes wait for an exchange of everything, for which training waits, to join at it
    samples: SampleSource | None = None
    is_cut_off = False  # the last exchange was not made, since other nodes cannot be reached
    adopts_buffers = False  # this node takes over the agreed values of buffers that the exchange does not change, too

    @abstractmethod
    def bind(self, parts: ExchangeParts) -> None:
        """Sets what the exchanges of one network consist of; called once."""

    @abstractmethod
    def settle(self, attempt: Callable[[Payload], ExchangeOutcome | None], payload: Payload) -> ExchangeOutcome | None:
        """Returns the outcome of `attempt`, which averages a payload in place; None if no exchange was made."""

    @abstractmethod
    def hold_vote(self, vote: Vote, waiter: CollectiveWaiter) -> Quorum:
        """Returns the quorum of the coming exchange; all ranks that take part call it together."""

    @abstractmethod
    def across(self, act: Callable[[CollectiveWaiter], T], waiter: CollectiveWaiter) -> T:
        """Returns the result of `act`, which makes collectives between nodes with the waiter that it is given."""

    @abstractmethod
    def conclude(self, payload: Payload, agreed: Tensors, waiter: CollectiveWaiter) -> None:
        """Returns once the averages of parameters and buffers count on all nodes."""

    @abstractmethod
    def deal_samples(self) -> None:
        """Lets the source of samples follow the exchange that was made; the training thread calls it."""

    @abstractmethod
    def close(self) -> None:
        """Ends what it has opened."""


class StaticMembership(Membership):
    """One world: the nodes given at the start take part in every exchange."""

    def __init__(self, groups: Groups, *, in_step: bool = True) -> None:
        self._groups, self._in_step = groups, in_step  # in_step: nodes have made the same number of steps

    def bind(self, parts: ExchangeParts) -> None:
        """Does nothing: these nodes stay."""

    def settle(self, attempt: Callable[[Payload], ExchangeOutcome | None], payload: Payload) -> ExchangeOutcome | None:
        """Returns the outcome of the only attempt."""
        return attempt(payload)

    def hold_vote(self, vote: Vote, waiter: CollectiveWaiter) -> Quorum:
        """Returns all nodes, each weighted by its samples since the last exchange."""
        groups = self._groups
        votes_inside = vote_inside(vote, groups, waiter)
        votes = [all_gather(votes_inside.node_row, peers.votes) for peers in groups.peers]  # each [nodes, 21 + buffers]
        waiter.wait([work for _, work in votes], waits_for_ranks=True)
        for rows, _ in votes:
            columns = VoteColumns.of(rows)
            require_lockstep(columns, range(len(groups.nodes)), "node", waiter, in_step=self._in_step)
        return votes_inside.quorum(votes[0][0], node=groups.index)

    def across(self, act: Callable[[CollectiveWaiter], T], waiter: CollectiveWaiter) -> T:
        """Returns the result of `act`; an error ends the run."""
        return act(waiter)

    def conclude(self, payload: Payload, agreed: Tensors, waiter: CollectiveWaiter) -> None:
        """Does nothing: an exchange that no rank failed in counts."""

    def deal_samples(self) -> None:
        """Does nothing: a plan says who trains what."""

    def close(self) -> None:
        """Does nothing: the groups are closed by whom they belong to."""
