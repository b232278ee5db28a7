"""Votes before an exchange: which nodes take part, and with what weight."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evenly.comm import CollectiveWaiter, Groups, all_gather
from evenly.errors import LockstepError
from evenly.exchange.tensors.fingerprint import NO_FINGERPRINT, UNLIKE, FingerprintValues

NOTHING = (0.0,) * 5
FINGERPRINT = slice(8 + len(NOTHING), 8 + len(NOTHING) + len(NO_FINGERPRINT.row))  # its columns in a row of votes
OTHER_TENSORS = (
    "are about to send other tensors: one calls agreed() where another one calls finish(), or averaged state of the "
    "optimizer is missing on some because they have not used a parameter yet, or only some have loaded weights"
)


@dataclass(frozen=True)
class Vote:
    """What a rank reports before an exchange: its step, and its samples since the last exchange."""

    step: int
    exchange: int
    samples: float
    layout: int  # hash of the description of what it is about to send
    backwards: int = 0
    measured: tuple[float, ...] = NOTHING  # a `ExchangeCosts` as numbers
    ends: bool = False  # this rank makes no step until all ranks are at the same point
    differs: bool = True  # its parameters may differ from those of other nodes
    doubtful: bool = False  # a backward was not finite and no step followed: a GradScaler may have skipped one
    changed: tuple[bool, ...] = ()  # for each buffer, whether it differs from the last agreed value
    fingerprint: FingerprintValues = NO_FINGERPRINT  # of the parameters
    learning_rate: float = 0.0
    holders: tuple[tuple[int, ...], ...] = ((0,),)  # local ranks of each replica of the node


@dataclass(frozen=True)
class Quorum:
    """Who takes part: weights by node and by replica of this node (each sum to 1)."""

    weights: tuple[float, ...]
    node: int
    shares: tuple[float, ...]
    measured: tuple[float, ...] = NOTHING  # the largest of all ranks
    ends: bool = False  # all ranks are at the same point
    differs: bool = True  # the parameters of some nodes may differ
    changed: tuple[bool, ...] = ()  # for each buffer, whether any rank has changed it
    fingerprints: tuple[FingerprintValues, ...] = (NO_FINGERPRINT,)  # by replica of the node
    node_fingerprints: tuple[FingerprintValues, ...] = (NO_FINGERPRINT,)
    learning_rates: tuple[float, ...] = ()  # by node


class Membership(ABC):
    """Decides before every exchange which nodes take part."""

    @abstractmethod
    def hold_vote(self, vote: Vote, waiter: CollectiveWaiter) -> Quorum:
        """Returns the quorum of the coming exchange; all ranks that take part call it together."""


class StaticMembership(Membership):
    """One world: the nodes given at the start take part in every exchange."""

    def __init__(self, groups: Groups, *, in_step: bool = True) -> None:
        self._groups, self._in_step = groups, in_step  # in_step: nodes have made the same number of steps

    def hold_vote(self, vote: Vote, waiter: CollectiveWaiter) -> Quorum:
        """Returns all nodes, each weighted by its samples since the last exchange."""
        groups = self._groups
        position = [vote.step, vote.exchange, vote.layout, vote.backwards]
        flags = [vote.doubtful, not vote.ends, vote.differs]
        values = [vote.samples, *flags, *vote.measured, *vote.fingerprint.row, vote.learning_rate, *vote.changed]
        row = torch.tensor([*position, *values], dtype=torch.float64)
        siblings, work = all_gather(row, groups.node_votes)  # [ranks of the node, 21 + buffers]
        waiter.wait([work], waits_for_ranks=True)
        self._require_lockstep(siblings, groups.ranks, "rank")
        node = siblings.amax(0)
        node[4] = siblings[:, 4].sum()
        fingerprints = [siblings[list(places), FINGERPRINT].sum(0) for places in vote.holders]  # of each replica: [7]
        node[FINGERPRINT] = fingerprints[0]
        if bool((siblings[:, FINGERPRINT.stop - 1] != siblings[0, FINGERPRINT.stop - 1]).any()):
            node[FINGERPRINT.stop - 1] = UNLIKE
        votes = [all_gather(node, peers.votes) for peers in groups.peers]  # each [nodes, 21 + buffers]
        waiter.wait([work for _, work in votes], waits_for_ranks=True)
        for rows, _ in votes:
            self._require_lockstep(rows, range(len(groups.nodes)), "node")
        rows = votes[0][0]
        return Quorum(
            weights=fractions(rows[:, 4].tolist()),
            node=groups.index,
            shares=fractions([float(siblings[places[0], 4]) for places in vote.holders]),
            measured=tuple(rows[:, 8 : 8 + len(NOTHING)].amax(0).tolist()),
            ends=not bool(rows[:, 6].any()),
            differs=bool(rows[:, 7].any()),
            changed=tuple(bool(value) for value in rows[:, FINGERPRINT.stop + 1 :].amax(0)),
            fingerprints=tuple(FingerprintValues.from_row(row.tolist()) for row in fingerprints),
            node_fingerprints=tuple(FingerprintValues.from_row(row) for row in rows[:, FINGERPRINT].tolist()),
            learning_rates=tuple(rows[:, FINGERPRINT.stop].tolist()),
        )

    def _require_lockstep(self, rows: torch.Tensor, names: "tuple[int, ...] | range", kind: str) -> None:
        first = 1 if kind == "node" and not self._in_step else 0
        compared = 4 if bool(rows[:, 5].any()) else 3  # closures may run different numbers of backwards
        compared = 3 if first else compared
        same = (rows[:, first:compared] == rows[0, first:compared]).all(0)
        if bool(same.all()):
            return
        positions = ", ".join(
            f"{kind} {name}: step {int(row[0])}, exchange {int(row[1])}, {int(row[3])} backwards"
            for name, row in zip(names, rows, strict=True)
        )
        if bool(rows[:, 5].any()):
            cause = "do not agree which steps a GradScaler skipped: pass it as scaler="
        else:
            is_same_step = bool(same[: 2 - first].all())
            cause = OTHER_TENSORS if is_same_step else "have made unequal numbers of steps"
        raise LockstepError(
            f"{kind}s met for an exchange but {cause} ({positions}). "
            "Give every rank the same number of batches and the same calls of step, end_epoch, agreed and finish."
        )


def fractions(amounts: Sequence[float]) -> tuple[float, ...]:
    """Returns amounts over their sum; equal fractions if the sum is 0."""
    total = sum(amounts)
    return tuple(amount / total if total else 1 / len(amounts) for amount in amounts)
