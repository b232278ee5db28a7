"""When rounds begin and how they end: a state machine without sockets, whose clock is passed in."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from evenly.coordination.formation import (
    Commit,
    NodeKey,
    PresentNode,
    Reference,
    form_round,
    misfits,
    must_wait,
    reference_of,
)
from evenly.coordination.values import Ballot, ExchangeRound, MemberRank, Proposal, RoundVerdict
from evenly.errors import MismatchError, SpecError

KEPT_VERDICTS = 16


class NodeTakenError(Exception):
    """Another start of the node is connected; it may be about to end."""


@dataclass(frozen=True)
class RoundSettings:
    """How long rounds wait for whom."""

    expected_nodes: int = 1  # so many must be present if none of them has applied a commit
    straggler_wait_s: float = 30.0  # for nodes that are connected
    regather_s: float = 0.5  # for nodes of the last round that are not, if the coordinator has just begun

    def __post_init__(self) -> None:
        if self.expected_nodes < 1 or not (self.straggler_wait_s >= 0 and self.regather_s >= 0):
            raise SpecError(
                f"expected_nodes={self.expected_nodes}, straggler_wait_s={self.straggler_wait_s} and "
                f"regather_s={self.regather_s} were given. Give at least one node, and seconds that are not negative."
            )


@dataclass(frozen=True)
class Formed:
    """The proposal of a rank has led to a round."""

    member: MemberRank
    ticket: int
    round: ExchangeRound


@dataclass(frozen=True)
class Refused:
    """The proposal of a rank is refused."""

    member: MemberRank
    ticket: int
    kind: Literal["mismatch", "non-finite"]
    why: str


@dataclass(frozen=True)
class Decided:
    """A round has ended, for one rank; `verdict` is None if the round is unknown."""

    member: MemberRank
    round_id: str
    verdict: RoundVerdict | None


@dataclass(frozen=True)
class Ended:
    """Groups of a generation are not used again."""

    generation: str
    why: str


RoundEvent: TypeAlias = Formed | Refused | Decided | Ended


@dataclass
class _Pending:
    proposal: Proposal
    ticket: int


@dataclass
class _LiveNode:
    """A node of which at least one rank is connected."""

    key: NodeKey
    connected: set[int] = field(default_factory=set)
    pending: dict[int, _Pending] = field(default_factory=dict)
    present_at_s: float | None = None
    was_present: bool = False

    @property
    def is_live(self) -> bool:
        return len(self.connected) == self.key[2]

    @property
    def is_present(self) -> bool:
        return self.is_live and len(self.pending) == self.key[2]

    def ranks(self) -> list[MemberRank]:
        """Returns the ranks that are connected."""
        return [MemberRank(*self.key[:2], rank, self.key[2]) for rank in sorted(self.connected)]

    def value(self) -> PresentNode:
        return PresentNode(self.key, tuple(self.pending[rank].proposal for rank in range(self.key[2])))


@dataclass
class _OpenRound:
    round: ExchangeRound
    signature: str
    tickets: dict[MemberRank, int]
    votes: dict[MemberRank, Ballot] = field(default_factory=dict)


class Rounds:
    """Who is connected, who is present, and the round that is open; what follows from it is in `events`.

    A round is formed when every node that is waited for is present, and ends with the last vote, the first vote
    against it, or the loss of a member. At most one is open.
    """

    def __init__(self, settings: RoundSettings) -> None:
        self._settings = settings
        self._job: str | None = None
        self._nodes: dict[str, _LiveNode] = {}
        self._open: _OpenRound | None = None
        self._commit: Commit | None = None
        self._verdicts: OrderedDict[str, RoundVerdict] = OrderedDict()
        self._regathers = True  # nodes of an earlier round may be about to come back
        self._events: list[RoundEvent] = []

    @property
    def is_waiting(self) -> bool:
        """Whether a round may be formed because time passes."""
        return self._open is None and any(node.is_present for node in self._nodes.values())

    def take_events(self) -> list[RoundEvent]:
        """Returns what has happened since the last call."""
        events, self._events = self._events, []
        return events

    def join(self, member: MemberRank, *, job: str) -> None:
        """Adds a rank; raises `MismatchError` if it is of another job or its node has another number of ranks."""
        if self._job is not None and self._job != job and self._nodes:
            raise MismatchError(
                f"node {member.node} was to join the job {job!r}; nodes of the job {self._job!r} are connected to this "
                "coordinator. Give the same --job on all nodes, or another coordinator."
            )
        if self._job != job:
            self._job, self._commit, self._regathers = job, None, True
        node = self._nodes.get(member.node)
        if node is not None and node.key[1] != member.start:
            raise NodeTakenError(member.node)
        key = (member.node, member.start, member.local_size)
        if node is not None and node.key != key:
            raise MismatchError(
                f"local rank {member.local_rank} of node {member.node} was to join with {member.local_size} local "
                f"ranks; the others of this start say {node.key[2]}. Start all ranks of a node with one launcher."
            )
        self._nodes.setdefault(member.node, _LiveNode(key)).connected.add(member.local_rank)

    def drop(self, member: MemberRank, *, why: str, now_s: float, is_loss: bool = True) -> None:
        """Removes a rank, and with it its node from the open round."""
        node = self._node_of(member)
        if node is None or member.local_rank not in node.connected:
            return
        node.connected.discard(member.local_rank)
        node.pending.pop(member.local_rank, None)
        node.present_at_s = None
        self._abort_with(member, why, lost=(member.node,) if is_loss else ())
        if self._commit is not None and node.key in self._commit.members:
            self._open_other_groups()  # those of this rank may be gone, even if it comes back
        if not node.connected:
            del self._nodes[member.node]
        self._regathers = self._regathers or not self._nodes
        self.tick(now_s)

    def propose(self, member: MemberRank, proposal: Proposal, *, ticket: int, now_s: float) -> None:
        """Records that a rank is ready for a round."""
        node = self._node_of(member)
        is_repeated = self._open is not None and self._open.tickets.get(member) == ticket  # after a reconnection
        if node is None or is_repeated:
            return
        self._abort_with(member, f"rank {member.local_rank} of node {member.node} proposed anew before it voted")
        node.pending[member.local_rank] = _Pending(proposal, ticket)
        if node.is_present and node.present_at_s is None:
            self._arrive(node, now_s)
        self.tick(now_s)

    def retract(self, member: MemberRank, *, ticket: int, now_s: float) -> None:
        """Takes back a proposal, also if it has led to a round."""
        node = self._node_of(member)
        if self._open is not None and self._open.tickets.get(member) == ticket:
            self._abort_with(member, f"rank {member.local_rank} of node {member.node} had stopped waiting")
        elif node is not None and ticket == getattr(node.pending.get(member.local_rank), "ticket", None):
            del node.pending[member.local_rank]
            node.present_at_s = None
        self.tick(now_s)

    def vote(self, member: MemberRank, ballot: Ballot, *, round_id: str, now_s: float) -> None:
        """Records a vote; the first one against the round ends it, and so does the last one."""
        if self._open is None or self._open.round.id != round_id or member not in self._open.tickets:
            self._events.append(Decided(member, round_id, self._verdicts.get(round_id)))
            return
        self._open.votes[member] = ballot
        if not ballot.is_ok:
            self._abort(f"rank {member.local_rank} of node {member.node}: {ballot.why or 'it voted against the round'}")
        elif len(self._open.votes) == len(self._open.tickets):
            self._count(self._open)
        self.tick(now_s)

    def tick(self, now_s: float) -> None:
        """Forms a round if one is due."""
        while self._open is None:
            present = [node for node in self._nodes.values() if node.is_present]
            nodes = sorted((node.value() for node in present), key=lambda node: node.key)
            reference = reference_of(nodes, self._commit)
            if not nodes or not self._is_due(present, nodes, reference, now_s):
                return
            if reference is None:
                why = "no node has parameters that are finite"
                self._refuse(nodes, dict.fromkeys((node.name for node in nodes), _not_finite(nodes, why)), "non-finite")
                continue
            waiting = must_wait(nodes, reference)
            present = [node for node in present if node.key[0] not in waiting]
            nodes = [node for node in nodes if node.name not in waiting]
            refused = misfits(nodes, reference, self._commit)
            if refused:
                self._refuse(nodes, refused, "mismatch")
                continue
            absent = sorted(name for name, node in self._nodes.items() if node.is_live and not node.is_present)
            formed = replace(
                form_round(nodes, reference, self._commit), waiting=tuple(sorted(waiting)), absent=tuple(absent)
            )
            self._open_round(present, formed, signature=nodes[0].signature)

    def _arrive(self, node: _LiveNode, now_s: float) -> None:
        """All ranks of a node have proposed; they must be about to exchange the same."""
        signatures = sorted({pending.proposal.signature for pending in node.pending.values()})
        if len(signatures) > 1:
            why = (
                f"the ranks of node {node.key[0]} were to exchange their model; they have different signatures: "
                f"{' and '.join(signature[:16] for signature in signatures)}. Start all ranks with the same model, "
                "optimizer and settings."
            )
            self._refuse([node.value()], {node.key[0]: why}, "mismatch")
            return
        node.present_at_s, node.was_present = now_s, True

    def _is_due(
        self, present: list[_LiveNode], nodes: list[PresentNode], reference: Reference | None, now_s: float
    ) -> bool:
        names = {node.name for node in nodes}
        absent = {name: node for name, node in self._nodes.items() if node.is_live and name not in names}
        last = self._commit
        holds_last = [last is not None and last.is_current(node) for node in nodes]
        is_held_elsewhere = last is not None and any(node.key in last.members for node in absent.values())
        if is_held_elsewhere and not any(holds_last):
            return False  # those that are present would begin a second run beside the one that goes on
        is_fresh = reference is not None and not reference.version
        if is_fresh and sum(node.is_usable for node in nodes) < self._settings.expected_nodes:
            return False
        arrivals = [node.present_at_s or 0.0 for node in present]
        counted = [at_s for at_s, holds in zip(arrivals, holds_last, strict=True) if holds] or arrivals
        waited_s = now_s - min(counted)
        peers = self._expected_peers(nodes) - names
        is_early = last is None and len(nodes) < self._settings.expected_nodes
        if peers - absent.keys() and waited_s < self._settings.regather_s:
            return False
        waits = any(node.was_present or is_early or name in peers for name, node in absent.items())
        return not waits or waited_s >= self._settings.straggler_wait_s

    def _expected_peers(self, nodes: Iterable[PresentNode]) -> set[str]:
        """Returns the nodes that may be about to come back, as this coordinator has just begun or had lost all."""
        if not self._regathers:
            return set()
        peers = {peer for node in nodes for proposal in node.proposals for peer in proposal.peers}
        return peers | ({key[0] for key in self._commit.members} if self._commit is not None else set())

    def _open_round(self, present: list[_LiveNode], formed: ExchangeRound, *, signature: str) -> None:
        tickets = {rank: node.pending[rank.local_rank].ticket for node in present for rank in node.ranks()}
        for node in present:
            node.pending.clear()
            node.present_at_s = None
        self._open = _OpenRound(formed, signature, tickets)
        self._events += [Formed(rank, ticket, formed) for rank, ticket in tickets.items()]

    def _refuse(
        self, nodes: list[PresentNode], reasons: Mapping[str, str], kind: Literal["mismatch", "non-finite"]
    ) -> None:
        for name in (node.name for node in nodes if node.name in reasons):
            node = self._nodes[name]
            for rank in node.ranks():
                self._events.append(Refused(rank, node.pending[rank.local_rank].ticket, kind, reasons[name]))
            node.pending.clear()
            node.present_at_s, node.was_present = None, False  # it is not waited for

    def _count(self, opened: _OpenRound) -> None:
        groups: dict[str, list[str]] = {}
        for rank, ballot in sorted(opened.votes.items(), key=lambda vote: (vote[0].node, vote[0].local_rank)):
            groups.setdefault(ballot.checksum, []).append(f"{rank.node}/{rank.local_rank}")
        if len(groups) > 1:
            parts = [f"{checksum[:16] or 'none'} on {', '.join(ranks)}" for checksum, ranks in groups.items()]
            self._abort(f"ranks ended with different values; their checksums are {'; '.join(parts)}")
            return
        formed = opened.round
        keys = frozenset((member.node, member.start, member.local_size) for member in formed.members)
        self._commit = Commit(formed.lineage, formed.number, keys, formed.generation, opened.signature)
        self._regathers = False
        self._end(opened, RoundVerdict(is_committed=True))

    def _abort_with(self, member: MemberRank, why: str, lost: tuple[str, ...] = ()) -> None:
        if self._open is not None and member in self._open.tickets:
            self._abort(why, lost)

    def _abort(self, why: str, lost: tuple[str, ...] = ()) -> None:
        if self._open is None:
            return
        opened = self._open
        self._open_other_groups()
        self._events.append(Ended(opened.round.generation, why))
        self._end(opened, RoundVerdict(is_committed=False, why=why, lost=lost))

    def _open_other_groups(self) -> None:
        """The next round has a generation of its own, also if its members are those of the last one."""
        if self._commit is not None:
            self._commit = replace(self._commit, generation="")

    def _end(self, opened: _OpenRound, verdict: RoundVerdict) -> None:
        self._open = None
        self._verdicts[opened.round.id] = verdict
        while len(self._verdicts) > KEPT_VERDICTS:
            self._verdicts.popitem(last=False)
        self._events += [Decided(rank, opened.round.id, verdict) for rank in opened.tickets]

    def _node_of(self, member: MemberRank) -> _LiveNode | None:
        node = self._nodes.get(member.node)
        return node if node is not None and node.key == (member.node, member.start, member.local_size) else None


def _not_finite(nodes: Iterable[PresentNode], why: str) -> str:
    names = ", ".join(node.name for node in nodes)
    return (
        f"the nodes {names} were to exchange parameters; {why}. Resume from a checkpoint of before they became NaN or "
        "infinite, with a lower learning rate if it happens again."
    )
