"""Exchanges of an elastic run: nodes come, go and return, and an exchange is a transaction.

Ranks propose an exchange to the coordinator, which forms a round of the nodes that are there. They average in a copy of
their payload, and vote; only when all have the same averages is the round committed, and the copy taken. If a node is
lost meanwhile, or votes against it, the copy is dropped and the ranks that are left propose again.

The ranks of a node always do the same: before and after the collectives between nodes they compare what they saw.
"""

import base64
import hashlib
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast, final

import numpy as np
import torch

from evenly.comm import CollectiveWaiter, Groups, GroupsAcrossNodes, first_line, gather_rows
from evenly.comm.elastic_groups import RoundAbortedError, RoundWaiter, leave_groups, open_across
from evenly.coordination import CoordinationClient, ExchangeRound, Proposal, RoundMember
from evenly.coordination.values import JSON, Fields
from evenly.errors import CoordinatorLostError, MismatchError, NonFiniteError, PeerError
from evenly.exchange.anchors import AnchorsBefore
from evenly.exchange.membership import ExchangeParts, Membership
from evenly.exchange.payload import Payload
from evenly.exchange.pending import ExchangeOutcome
from evenly.exchange.state_transfer import JoinState, Tensors, broadcast_state
from evenly.exchange.votes import Quorum, Vote, vote_inside

logger = logging.getLogger(__name__)

T = TypeVar("T")

COMMITTED, ABORTED, UNKNOWN = 1, 2, 3
DIFFERENT = "different values"  # in the reason of a round that is aborted for its checksums
MOST_DIFFERENCES = 5
KNOWN_COMMITS = 4
NUMBERS = 21  # of a row of votes, before those of buffers
CHECKED = 16  # parts of a tensor whose words are summed


@dataclass(frozen=True)
class _Before:
    """What an attempt may change."""

    anchors: AnchorsBefore
    agreed_buffers: Tensors
    across: GroupsAcrossNodes


class _SiblingGaveUpError(Exception):
    """Another rank of this node has given up waiting for a round."""


class PostponedError(Exception):
    """The coordinator cannot be reached: the exchange is not made, and its steps count for the next one."""


@final
class ElasticMembership(Membership):
    """The nodes of an elastic run, as one rank sees them."""

    is_elastic = True

    def __init__(
        self,
        groups: Groups,
        client: CoordinationClient,
        *,
        signature: str,
        timeout_s: float,
        transfer_s: float,
        concurrent: bool,
    ) -> None:
        """Proposes nothing yet.

        Args:
            groups: of this node; those between nodes are replaced with each generation of nodes.
            client: of this rank.
            signature: what must be equal on all nodes, as a hash.
            timeout_s: how long an exchange may wait for other nodes.
            transfer_s: the time limit of a transfer between nodes.
            concurrent: whether exchanges run in another thread.
        """
        self.received: JoinState | None = None  # what this node takes over with the round that is open
        self.has_waiting = False
        self.is_cut_off = False  # the last exchange was postponed
        self.version = 0  # the number of the last round that this node took part in
        self._lineage = ""
        self._groups = groups
        self._own = groups.across  # those of this node alone
        self._client = client
        self._signature = signature
        self._timeout_s = timeout_s
        self._transfer_s = transfer_s
        self._concurrent = concurrent
        self._generation = ""
        self._round: ExchangeRound | None = None
        self._names: tuple[str, ...] = ()  # of the nodes of the last round
        self._parts: ExchangeParts | None = None
        self._averages: Payload | None = None  # of the attempt
        self._is_healthy = True
        self._doubts = False  # the last averages were not finite
        self._differences = 0  # attempts in a row that ended with different values
        self._proposals = 0
        self._known_commits: list[str] = []  # the ids of the last rounds that this node knows to be committed
        self._doubted: dict[str, float] = {}  # samples in rounds since then that may have been committed, by id
        self._committed: ExchangeRound | None = None  # which the source of samples has not followed yet
        self._samples_state: Fields | None = None  # of another node, whose source of samples is newer

    @property
    def node(self) -> str:
        """The name of this node."""
        return self._client.member.node

    def bind(self, parts: ExchangeParts) -> None:
        """Sets what the exchanges of one network consist of."""
        self._parts = parts

    @property
    def _bound(self) -> ExchangeParts:
        if self._parts is None:
            raise RuntimeError("an exchange was proposed before the membership was bound to a network")
        return self._parts

    def settle(self, attempt: Callable[[Payload], ExchangeOutcome | None], payload: Payload) -> ExchangeOutcome | None:
        """Returns the outcome of the attempt that was committed; None if the coordinator cannot be reached."""
        payload.slices = ()  # they refer to groups that may be left before they are used
        while True:
            before = _Before(self._bound.anchors.fork(), dict(self._bound.buffers.agreed), self._groups.across)
            averages = self._averages = payload.scratch()
            self.received = self._samples_state = None
            self.adopts_buffers = False
            self._is_healthy = self._looks_healthy(averages)
            try:
                outcome = attempt(averages)
            except RoundAbortedError as aborted:
                logger.info("an exchange is tried again: %s", str(aborted))  # a record may be kept
                self._undo(before)
                self._require_progress(str(aborted))
            except PostponedError as postponed:
                level = logging.DEBUG if self.is_cut_off else logging.WARNING
                logger.log(level, "an exchange is postponed: %s", str(postponed))
                self.is_cut_off = True
                self._undo(before, leaves=False)
                return None
            except NonFiniteError as error:
                self._refuse(str(error))
                if self._doubts:
                    raise
                self._doubts = True  # it may come from another node: each looks at its own parameters now
                self._undo(before)
            except BaseException as error:
                self._refuse(f"{type(error).__name__}: {error}")
                raise
            else:
                self._doubts = self.is_cut_off = False
                self._differences = 0
                payload.take(averages, change=payload.change and self.received is None)
                return outcome
            finally:
                self._averages, averages.slices = None, ()

    def _undo(self, before: "_Before", *, leaves: bool = True) -> None:
        """Restores what an attempt has changed, and leaves its groups, where collectives may be pending."""
        self._bound.anchors.put_back(before.anchors)
        self._bound.buffers.agreed = before.agreed_buffers
        has_moved = self._groups.across is not before.across
        if leaves or has_moved:
            self._forget_generation()
        if has_moved:  # anchors have the slices of the nodes before
            self._groups.across = before.across
            self._bound.replica_exchange.follow_nodes()

    def _looks_healthy(self, payload: Payload) -> bool:
        """Returns whether parameters and buffers may count; parameters are looked at where that costs no exchange."""
        buffers = self._bound.buffers
        flags = [_became_nonfinite(buffer, buffers.agreed.get(name)) for name, buffer in buffers.now().items()]
        if flags and bool(torch.stack(flags).any()):
            return False
        looks = self._doubts or len(self._groups.nodes) == 1
        return not looks or all(_is_finite(packed.vector) for packed in payload.packed)

    def _require_progress(self, why: str) -> None:
        """Raises `MismatchError` if ranks end with different values again and again."""
        self._differences = self._differences + 1 if DIFFERENT in why else 0
        if self._differences >= MOST_DIFFERENCES:
            raise MismatchError(
                f"{MOST_DIFFERENCES} exchanges in a row ended with different values on some ranks: {why}. Nothing was "
                "merged. Look for what changes parameters on some ranks only, or for a device that computes wrongly."
            )

    def hold_vote(self, vote: Vote, waiter: CollectiveWaiter) -> Quorum:
        """Proposes an exchange; returns the quorum of the round that is formed, once its groups are open."""
        votes = vote_inside(vote, self._groups, waiter)
        proposal = Proposal(
            version=self.version,
            lineage=self._lineage,
            step=vote.step,
            samples=vote.samples,
            signature=hashlib.sha256(f"{self._signature}:{vote.payload_hash:x}".encode()).hexdigest(),
            gives_state=vote.is_whole,
            has_groups=self._generation != "",
            is_healthy=self._is_healthy,
            ends=vote.waits_for_all,
            facts=self._facts(votes.node_row) if self._groups.local_rank == 0 else {},
            peers=self._names,
        )
        formed = self._propose(proposal, waiter)
        self._round = formed
        self.has_waiting = bool(formed.waiting)
        index = next(i for i, member in enumerate(formed.members) if member.node == self._client.member.node)
        self._follow(formed, index, waiter)
        node_rows = torch.stack([_decoded(member) for member in formed.members])
        return votes.quorum(node_rows, node=index, weights=_weights(formed))

    def across(self, act: Callable[[CollectiveWaiter], T], waiter: CollectiveWaiter) -> T:
        """Returns the result of collectives between nodes; if they fail on any rank of this node, all give them up."""
        if len(self._open_round().members) == 1:
            return act(waiter)
        return self._compared(lambda: act(self._round_waiter(waiter)), waiter)

    def _compared(self, act: Callable[[], T], waiter: CollectiveWaiter) -> T:
        """Returns the result of `act`; if it is given up on any rank of this node, all give it up."""
        round_id = self._open_round().id
        results: list[T] = []
        error: RoundAbortedError | None = None
        try:
            results.append(act())
        except RoundAbortedError as aborted:
            error = aborted
        except RuntimeError as broken:  # gloo may raise where a collective begins
            if (why := self._client.aborted(round_id)) is None:
                raise
            error = RoundAbortedError(f"{why}: {first_line(broken)}")
        try:
            self._require_all(error, waiter)
        finally:
            error = None  # it refers to this frame, and so to the groups
        return results[0]

    def conclude(self, payload: Payload, agreed: Tensors, waiter: CollectiveWaiter) -> None:
        """Votes for the averages; returns if all ranks of all nodes have the same, so that the round is committed."""
        formed = self._open_round()
        checksum = _checksum([*(packed.vector for packed in payload.packed), *agreed.values()])
        why = "it is not known whether the round was committed"
        try:
            verdict = self._client.vote(formed.id, is_ok=True, checksum=checksum, timeout_s=self._transfer_s)
            own, why = (COMMITTED if verdict.is_committed else ABORTED), verdict.why
        except CoordinatorLostError:
            own = UNKNOWN
        verdicts = self._gather(own, waiter)
        self._round = None
        if COMMITTED in verdicts:
            self._known_commits = [*self._known_commits, formed.id][-KNOWN_COMMITS:]
            self._doubted = {}
            self.version, self._lineage = formed.number, formed.lineage
            self._names = formed.nodes
            self._committed = formed
        elif ABORTED in verdicts:
            raise RoundAbortedError(why or "another rank of this node saw it given up")
        else:
            own_index = formed.nodes.index(self.node)
            self._doubted[formed.id] = formed.members[own_index].samples
            raise PostponedError(why)

    def deal_samples(self) -> None:
        """Lets the source of samples follow the round that was committed last."""
        formed, self._committed = self._committed, None
        if self.samples is None or formed is None:
            return
        if self._samples_state is not None:
            self.samples.adopt(self._samples_state)
            self._samples_state = None
        reports = {member.node: report for member in formed.members if (report := _samples_of(member)) is not None}
        if self._client.member.node in reports:
            lacking = zip(formed.members, _lacking(formed), strict=True)
            discarded = [member.node for member, lacks in lacking if lacks]
            self.samples.commit(reports, absent=formed.absent, discarded=discarded)

    def close(self) -> None:
        """Tells the coordinator that this rank ends."""
        self._client.leave()
        self._client.close()
        if self._parts is not None and self._groups.across is not self._own:
            self._forget_generation()
            self._groups.across = self._own
            self._parts.replica_exchange.follow_nodes()

    def _facts(self, node_row: torch.Tensor) -> dict[str, JSON]:
        facts: dict[str, JSON] = {"row": _encoded(node_row), "commits": [*self._known_commits]}
        facts["doubts"] = dict(self._doubted)
        return facts if self.samples is None else {**facts, "samples": self.samples.report()}

    def _propose(self, proposal: Proposal, waiter: CollectiveWaiter) -> ExchangeRound:
        formed: ExchangeRound | None = None
        why = ""
        ranks = self._groups.rank_group
        self._proposals += 1
        given_up = f"elastic/proposal {self._proposals} is given up"

        def check() -> None:
            waiter.monitor.check()
            if ranks.size > 1 and ranks.store.check([given_up]):
                raise _SiblingGaveUpError

        try:
            formed = self._client.propose(proposal, timeout_s=self._timeout_s, check=check)
        except CoordinatorLostError as lost:
            why = str(lost)
            if ranks.size > 1:
                ranks.store.set(given_up, "1")
        except _SiblingGaveUpError:
            why = "another rank of this node does not reach the coordinator"
        ids = self._gather(_number(formed.id) if formed is not None else 0, waiter)
        if formed is None and not any(ids):
            raise PostponedError(why)
        if formed is None or len(set(ids)) > 1:
            self._round = formed
            self._refuse("the ranks of a node were asked to different rounds")
            raise RoundAbortedError("the ranks of this node were asked to different rounds")
        return formed

    def _follow(self, formed: ExchangeRound, index: int, waiter: CollectiveWaiter) -> None:
        """Opens the groups of a new generation of nodes; nodes that lack state get it from another one."""
        parts, anchors = self._bound, self._bound.anchors
        is_new = formed.generation != self._generation
        lacks_training = _lacking(formed)
        lacks_samples = _lacking_samples(formed)
        lacks_state = [lacks or m.is_behind for lacks, m in zip(lacks_training, formed.members, strict=True)]
        full: Mapping[str, Tensors] = {}
        if anchors.are_kept and (is_new or any(lacks_state)):
            full = parts.payload_builder.full_anchors(anchors, waiter)
            if len(self._groups.nodes) == 1:  # nothing was agreed with others: this node's parameters are the anchor
                full = {"agreed": full["agreed"]}
        if is_new:
            self._open(formed, index, waiter)
        self.adopts_buffers = lacks_state[index]
        if any(lacks_state) or any(lacks_samples):
            state = self._transfer(formed, index, full, waiter)
            if lacks_samples[index] and isinstance(state.training, dict):
                self._samples_state = state.training.get("samples")
            if lacks_state[index]:
                device = self._averages.packed[0].vector.device if self._averages is not None else torch.device("cpu")
                sent = {name: _moved(tensors, device) for name, tensors in state.anchors.items()}
                full = {**sent, **({} if lacks_training[index] else _own_errors(full))}
                before = parts.buffers.agreed
                parts.buffers.agreed = {
                    name: value.to(before[name].device) for name, value in state.agreed_buffers.items()
                }
            if lacks_training[index]:
                self.received = state
        if full and len(formed.members) > 1:
            parts.payload_builder.cut_anchors(anchors, full, nodes=len(formed.members))
            anchors.accept()
        if self._averages is not None:
            parts.replica_exchange.cut(self._averages)

    def _open(self, formed: ExchangeRound, index: int, waiter: CollectiveWaiter) -> None:
        self._forget_generation()
        waiting = self._round_waiter(waiter)
        opened = self._compared(
            lambda: open_across(
                self._client,
                formed.generation,
                [member.local_size for member in formed.members],
                index=index,
                local_rank=self._groups.rank_group.rank,
                concurrent=self._concurrent,
                timeout_s=self._transfer_s,
                check=waiting.require_alive,
            ),
            waiter,
        )
        self._groups.across = opened
        self._generation = formed.generation
        self._bound.replica_exchange.follow_nodes()

    def _transfer(
        self, formed: ExchangeRound, index: int, full: Mapping[str, Tensors], waiter: CollectiveWaiter
    ) -> JoinState:
        """Returns the state of the node that gives it, sent to all ranks."""
        parts, source = self._bound, self._groups.nodes[_giver(formed)][0]
        state = None
        if self._groups.rank == source:
            sent = {name: tensors for name, tensors in full.items() if name != "residual"}
            state = JoinState(parts.capture(), dict(parts.buffers.agreed), dict(sent))
        world = self._groups.world
        return self.across(lambda between: broadcast_state(state, world, between, source=source), waiter)

    def _require_all(self, error: RoundAbortedError | None, waiter: CollectiveWaiter) -> None:
        """Raises `RoundAbortedError` on all ranks of the node if one of them has met it."""
        if any(self._gather(int(error is not None), waiter)):
            why = "another rank of this node could not reach its peers" if error is None else str(error)
            self._refuse(why)
            raise error or RoundAbortedError(why)

    def _refuse(self, why: str) -> None:
        """Votes against the round that is open."""
        formed, self._round = self._round, None
        if formed is None:
            return
        try:
            self._client.vote(formed.id, is_ok=False, why=why, timeout_s=self._transfer_s)
        except PeerError as lost:
            logger.debug("a vote against a round was not heard: %s", lost)

    def _forget_generation(self) -> None:
        if self._generation:
            leave_groups(self._groups.across)
            self._generation = ""

    def _gather(self, number: int, waiter: CollectiveWaiter) -> list[int]:
        """Returns the number of each rank of this node."""
        rows = gather_rows(torch.tensor([number]), self._groups.node_votes, waiter, waits_for_ranks=True)
        return [int(row) for row in rows[:, 0]]

    def _round_waiter(self, waiter: CollectiveWaiter) -> RoundWaiter:
        round_id = self._open_round().id
        return RoundWaiter(
            waiter.monitor,
            label=waiter.label,
            step=waiter.step,
            timeout_s=self._transfer_s,
            why_aborted=lambda: self._client.aborted(round_id),
        )

    def _open_round(self) -> ExchangeRound:
        if self._round is None:
            raise RoundAbortedError("the round was given up")
        return self._round


def _lacking(formed: ExchangeRound) -> list[bool]:
    """Returns which nodes take over the training of another one: their own parameters have no weight.

    If all are fresh, they begin as the first of them.
    """
    is_first = all(member.version == 0 for member in formed.members)
    return [m.needs_state or (is_first and index != _giver(formed)) for index, m in enumerate(formed.members)]


def _weights(formed: ExchangeRound) -> tuple[float, ...]:
    """Returns the weight of each node: its samples; equal weights if there are none."""
    lacks = _lacking(formed)
    amounts = [
        0.0 if lack else member.samples - _counted_before(member, formed)
        for member, lack in zip(formed.members, lacks, strict=True)
    ]
    if not sum(amounts):
        amounts = [float(index == _giver(formed)) if any(lacks) else 1.0 for index in range(len(amounts))]
    return tuple(amount / sum(amounts) for amount in amounts)


def _counted_before(member: RoundMember, formed: ExchangeRound) -> float:
    """Returns the samples of a node that were counted in a round of which it did not learn that it was committed."""
    committed: set[str] = set()
    for other in formed.members:
        ids = other.facts[0].get("commits")
        committed.update(map(str, ids if isinstance(ids, list) else []))
    doubts = member.facts[0].get("doubts")
    doubted = doubts if isinstance(doubts, dict) else {}
    counted = [float(str(samples)) for id, samples in doubted.items() if id in committed]
    return min(member.samples, max(counted, default=0.0))


def _giver(formed: ExchangeRound) -> int:
    """Returns the index of the node that gives its state to others: of those that lack none the newest in samples."""
    candidates = [i for i, member in enumerate(formed.members) if not (member.needs_state or member.is_behind)]
    numbers = _samples_numbers(formed)
    return max(candidates, key=lambda index: (numbers[index], -index))


def _samples_of(member: RoundMember) -> Fields | None:
    report = member.facts[0].get("samples")
    return report if isinstance(report, dict) else None


def _samples_numbers(formed: ExchangeRound) -> list[int]:
    """Returns how many commits the source of samples of each node has followed; -1 without one."""
    reports = [_samples_of(member) for member in formed.members]
    return [-1 if report is None else int(str(report.get("number", 0))) for report in reports]


def _lacking_samples(formed: ExchangeRound) -> list[bool]:
    """Returns which nodes take over the account of samples of another one."""
    numbers = _samples_numbers(formed)
    return [0 <= number < max(numbers) for number in numbers]


def _own_errors(full: Mapping[str, Tensors]) -> dict[str, Tensors]:
    return {name: tensors for name, tensors in full.items() if name == "residual"}


def _moved(tensors: Tensors, device: torch.device) -> Tensors:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _became_nonfinite(buffer: torch.Tensor, agreed: torch.Tensor | None) -> torch.Tensor:
    """Returns whether elements of a buffer are not finite that were finite when nodes agreed on them."""
    if not buffer.is_floating_point() or agreed is None or agreed.shape != buffer.shape:
        return torch.zeros((), dtype=torch.bool, device=buffer.device)
    return (~buffer.isfinite() & agreed.isfinite()).any()


def _is_finite(vector: torch.Tensor) -> bool:
    if not vector.numel() or not vector.is_floating_point():
        return True
    return all(bool(torch.isfinite(value)) for value in torch.aminmax(vector))


def _checksum(tensors: Sequence[torch.Tensor]) -> str:
    """Returns a checksum of the bits: the sum of the words of each part of a tensor, and that of the bytes left."""
    sums = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole = flat.numel() // (8 * CHECKED) * 8 * CHECKED
        parts = flat[:whole].view(torch.int64).view(CHECKED, -1).sum(1).tolist()
        sums.append(".".join(f"{part:x}" for part in [*parts, zlib.adler32(flat[whole:].cpu().numpy().tobytes())]))
    return hashlib.sha256(",".join(sums).encode()).hexdigest()


def _number(text: str) -> int:
    """Returns the id of a round as a number, which is not 0."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) + 1


def _encoded(row: torch.Tensor) -> list[JSON]:
    """Returns a row of votes as two texts and a number: its numbers, which buffers have changed, how many there are."""
    numbers, changed = row[:NUMBERS].to(torch.float64).numpy(), row[NUMBERS:].to(torch.uint8).numpy()
    bits = np.packbits(changed).tobytes()
    return [base64.b64encode(numbers.tobytes()).decode(), base64.b64encode(bits).decode(), len(changed)]


def _decoded(member: RoundMember) -> torch.Tensor:
    numbers, bits, count = cast("tuple[str, str, int]", member.facts[0]["row"])
    changed = np.unpackbits(np.frombuffer(base64.b64decode(bits), dtype=np.uint8), count=count)
    row = np.concatenate([np.frombuffer(base64.b64decode(numbers)), changed.astype(np.float64)])
    return torch.from_numpy(row)
