"""Who takes part in an exchange, and with what weight."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evenly.comm import CollectiveWaiter, Groups, all_gather
from evenly.errors import LockstepError
from evenly.exchange.tensors.fingerprint import NO_FINGERPRINT, UNLIKE, FingerprintValues

NOTHING = (0.0,) * 5
HELD = slice(8 + len(NOTHING), 8 + len(NOTHING) + len(NO_FINGERPRINT.row))  # columns of a row of votes
OTHER_TENSORS = (
    "are about to send other tensors: one calls agreed() where another one calls finish(), or state of the optimizer "
    "is averaged that some do not have, as they have not used a parameter yet, or only some have loaded weights"
)


@dataclass(frozen=True)
class Vote:
    """What a rank brings to an exchange: where it stands and the samples it has used since the last one."""

    step: int
    exchange: int
    samples: float
    layout: int  # hash of what it is about to send
    backwards: int = 0
    measured: tuple[float, ...] = NOTHING  # a `ExchangeCosts` as numbers
    ends: bool = False  # this rank makes no step before all ranks have come as far
    differs: bool = True  # its parameters may not be those of the other nodes
    doubtful: bool = False  # a backward was not finite and no step followed: a GradScaler may have skipped one
    changed: tuple[bool, ...] = ()  # for each buffer, whether it differs from the last agreed value
    held: FingerprintValues = NO_FINGERPRINT  # fingerprint of the parameters
    learning_rate: float = 0.0
    holders: tuple[tuple[int, ...], ...] = ((0,),)  # places in the node of those who hold one network together


@dataclass(frozen=True)
class Quorum:
    """Who takes part: weights by node and by network of this node (each sum to 1)."""

    weights: tuple[float, ...]
    node: int
    shares: tuple[float, ...]
    measured: tuple[float, ...] = NOTHING  # the largest of all ranks
    ends: bool = False  # all ranks have come as far
    differs: bool = True  # some may have other parameters than the others
    changed: tuple[bool, ...] = ()  # for each buffer, whether any rank has changed it
    held: tuple[FingerprintValues, ...] = (NO_FINGERPRINT,)  # by each network of the node
    held_by_nodes: tuple[FingerprintValues, ...] = (NO_FINGERPRINT,)
    learning_rates: tuple[float, ...] = ()  # by node


class Membership(ABC):
    """Answers before every exchange who takes part in it."""

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
        stand = [vote.step, vote.exchange, vote.layout, vote.backwards]
        flags = [vote.doubtful, not vote.ends, vote.differs]
        told = [vote.samples, *flags, *vote.measured, *vote.held.row, vote.learning_rate, *vote.changed]
        row = torch.tensor([*stand, *told], dtype=torch.float64)
        siblings, work = all_gather(row, groups.node_votes)  # [ranks of the node, 21 + buffers]
        waiter.wait([work], waits_for_ranks=True)
        self._require_lockstep(siblings, groups.ranks, "rank")
        node = siblings.amax(0)
        node[4] = siblings[:, 4].sum()
        held = [siblings[list(places), HELD].sum(0) for places in vote.holders]  # of each network: [7]
        node[HELD] = held[0]
        if bool((siblings[:, HELD.stop - 1] != siblings[0, HELD.stop - 1]).any()):
            node[HELD.stop - 1] = UNLIKE
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
            changed=tuple(bool(value) for value in rows[:, HELD.stop + 1 :].amax(0)),
            held=tuple(FingerprintValues.from_row(row.tolist()) for row in held),
            held_by_nodes=tuple(FingerprintValues.from_row(row) for row in rows[:, HELD].tolist()),
            learning_rates=tuple(rows[:, HELD.stop].tolist()),
        )

    def _require_lockstep(self, rows: torch.Tensor, names: "tuple[int, ...] | range", kind: str) -> None:
        first = 1 if kind == "node" and not self._in_step else 0
        compared = 4 if bool(rows[:, 5].any()) else 3  # a closure may well run another number of backwards
        compared = 3 if first else compared
        same = (rows[:, first:compared] == rows[0, first:compared]).all(0)
        if bool(same.all()):
            return
        stands = ", ".join(
            f"{kind} {name}: step {int(row[0])}, exchange {int(row[1])}, {int(row[3])} backwards"
            for name, row in zip(names, rows, strict=True)
        )
        if bool(rows[:, 5].any()):
            cause = "do not agree which steps a GradScaler skipped: pass it as scaler="
        else:
            known = bool(same[: 2 - first].all())
            cause = OTHER_TENSORS if known else "have made unequal numbers of steps"
        raise LockstepError(
            f"{kind}s met for an exchange but {cause} ({stands}). "
            "Give every rank the same number of batches and the same calls of step, end_epoch, agreed and finish."
        )


def fractions(amounts: Sequence[float]) -> tuple[float, ...]:
    """Returns amounts over their sum; equal ones where there is none."""
    total = sum(amounts)
    return tuple(amount / total if total else 1 / len(amounts) for amount in amounts)
