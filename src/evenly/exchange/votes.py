"""Votes before an exchange, and the quorum that follows from them: with what weight each node takes part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from evenly.comm import CollectiveWaiter, Groups, gather_rows
from evenly.errors import LockstepError
from evenly.exchange.tensors.fingerprint import NO_FINGERPRINT, UNLIKE, FingerprintValues

NOTHING = (0.0,) * 5
OTHER_TENSORS = (
    "are about to send other tensors: one calls agreed() where another one calls finish(), or averaged state of the "
    "optimizer is missing on some because they have not used a parameter yet, or only some have loaded weights, or "
    "frozen or unfrozen a parameter"
)


@dataclass(frozen=True)
class Vote:
    """What a rank reports before an exchange: its step, and its samples since the last exchange."""

    step: int
    exchange: int
    samples: float
    payload_hash: int  # of the description of what it is about to send
    backwards: int = 0  # whose gradients it has started to average
    measured: tuple[float, ...] = NOTHING  # a `ExchangeCosts` as numbers
    waits_for_all: bool = False  # this rank makes no step until all ranks are at the same point
    may_differ: bool = True  # its parameters, from those of other nodes
    may_have_skipped_step: bool = False  # by a GradScaler: a backward was not finite and no step followed
    changed: tuple[bool, ...] = ()  # for each buffer, whether it differs from the last agreed value
    fingerprint: FingerprintValues = NO_FINGERPRINT  # of the parameters
    learning_rate: float = 0.0
    is_whole: bool = True  # all fragments are exchanged, and training waits for it
    holders: tuple[tuple[int, ...], ...] = ((0,),)  # local ranks of each replica of the node


@dataclass(frozen=True)
class Quorum:
    """Who takes part: weights by node and by replica of this node (each sum to 1)."""

    weights: tuple[float, ...]
    node: int
    shares: tuple[float, ...]
    rank_shares: tuple[float, ...] = ()  # weights by rank of this node, by its own samples
    measured: tuple[float, ...] = NOTHING  # the largest of all ranks
    is_assembled: bool = False  # all ranks are at the same point
    may_differ: bool = True  # the parameters of some nodes
    changed: tuple[bool, ...] = ()  # for each buffer, whether any rank has changed it
    fingerprints: tuple[FingerprintValues, ...] = (NO_FINGERPRINT,)  # by replica of the node
    node_fingerprints: tuple[FingerprintValues, ...] = (NO_FINGERPRINT,)
    learning_rates: tuple[float, ...] = ()  # by node


class VoteColumns(NamedTuple):
    """The votes of several ranks or nodes, one in a row; each field is a view of its columns."""

    step: torch.Tensor
    exchange: torch.Tensor
    payload_hash: torch.Tensor
    backwards: torch.Tensor
    samples: torch.Tensor
    may_have_skipped_step: torch.Tensor
    makes_steps: torch.Tensor  # does not wait for all
    may_differ: torch.Tensor
    learning_rate: torch.Tensor
    measured: torch.Tensor  # [rows, 5]
    fingerprint: torch.Tensor  # [rows, 7]
    changed: torch.Tensor  # [rows, buffers]

    @classmethod
    def of(cls, rows: torch.Tensor) -> "VoteColumns":
        """Returns the columns of `rows`, in which `_row` wrote votes."""
        sizes = [9, len(NOTHING), len(NO_FINGERPRINT.row)]
        numbers, measured, fingerprint, changed = torch.split(rows, [*sizes, rows.shape[1] - sum(sizes)], dim=1)
        columns = dict(zip(cls._fields, numbers.unbind(1), strict=False))  # the first nine fields have one column
        return cls(**columns, measured=measured, fingerprint=fingerprint, changed=changed)


def _row(vote: Vote) -> torch.Tensor:
    """Returns a vote as numbers, in the order of `VoteColumns`."""
    position = [vote.step, vote.exchange, vote.payload_hash, vote.backwards]
    flags = [vote.may_have_skipped_step, not vote.waits_for_all, vote.may_differ]
    numbers = [*position, vote.samples, *flags, vote.learning_rate]
    return torch.tensor([*numbers, *vote.measured, *vote.fingerprint.row, *vote.changed], dtype=torch.float64)


@dataclass(frozen=True)
class VotesInside:
    """The votes of the ranks of this node."""

    rows: torch.Tensor  # [ranks of the node, 21 + buffers]
    node_row: torch.Tensor  # the vote of the node
    fingerprints: tuple[torch.Tensor, ...]  # of each replica: [7]
    holders: tuple[tuple[int, ...], ...]

    def quorum(self, node_rows: torch.Tensor, *, node: int, weights: Sequence[float] | None = None) -> Quorum:
        """Returns the quorum of the nodes with these votes; their weights are their samples, unless given."""
        siblings, nodes = VoteColumns.of(self.rows), VoteColumns.of(node_rows)
        return Quorum(
            weights=fractions(nodes.samples.tolist()) if weights is None else tuple(weights),
            node=node,
            shares=fractions([float(siblings.samples[holders[0]]) for holders in self.holders]),
            rank_shares=fractions(siblings.samples.tolist()),
            measured=tuple(nodes.measured.amax(0).tolist()),
            is_assembled=not bool(nodes.makes_steps.any()),
            may_differ=bool(nodes.may_differ.any()),
            changed=tuple(bool(value) for value in nodes.changed.amax(0)),
            fingerprints=tuple(FingerprintValues.from_row(row.tolist()) for row in self.fingerprints),
            node_fingerprints=tuple(FingerprintValues.from_row(row) for row in nodes.fingerprint.tolist()),
            learning_rates=tuple(nodes.learning_rate.tolist()),
        )


def vote_inside(vote: Vote, groups: Groups, waiter: CollectiveWaiter) -> VotesInside:
    """Returns the votes of all ranks of this node, which call it together."""
    rows = gather_rows(_row(vote), groups.node_votes, waiter, waits_for_ranks=True)
    siblings = VoteColumns.of(rows)
    require_lockstep(siblings, groups.ranks, "rank", waiter, in_step=True)
    fingerprints = tuple(siblings.fingerprint[list(holders)].sum(0) for holders in vote.holders)
    return VotesInside(rows, _node_row(rows, fingerprints[0]), fingerprints, vote.holders)


def require_lockstep(
    votes: VoteColumns, names: Sequence[int], kind: str, waiter: CollectiveWaiter, *, in_step: bool
) -> None:
    """Raises `LockstepError` unless all have made the same exchanges and send the same and, if `in_step`, steps."""
    is_skip_possible = bool(votes.may_have_skipped_step.any())
    compared = [votes.exchange, votes.payload_hash]
    if in_step:
        compared = [votes.step, *compared]
        if is_skip_possible:  # otherwise not: closures may run different numbers of backwards
            compared.append(votes.backwards)
    if all(map(_are_equal, compared)):
        return
    waiter.monitor.poll_for_cause()  # another node may know which parameter is different there
    positions = ", ".join(
        f"{kind} {name}: step {int(step)}, exchange {int(exchange)}, {int(backwards)} backwards"
        for name, step, exchange, backwards in zip(names, votes.step, votes.exchange, votes.backwards, strict=True)
    )
    if is_skip_possible:
        cause = "do not agree which steps a GradScaler skipped: pass it as scaler="
    else:
        is_same_step = all(map(_are_equal, compared[:-1]))
        cause = OTHER_TENSORS if is_same_step else "have made unequal numbers of steps"
    raise LockstepError(
        f"{kind}s met for an exchange but {cause} ({positions}). "
        "Give every rank the same number of batches and the same calls of step, end_epoch, agreed and finish."
    )


def _node_row(siblings: torch.Tensor, fingerprint: torch.Tensor) -> torch.Tensor:
    """Returns the vote of a node from the votes of its ranks, and the fingerprint of its first replica."""
    row = siblings.amax(0)
    node, platforms = VoteColumns.of(row[None]), VoteColumns.of(siblings).fingerprint[:, -1]
    node.samples.copy_(VoteColumns.of(siblings).samples.sum())
    node.fingerprint.copy_(fingerprint)
    if not _are_equal(platforms):
        node.fingerprint[:, -1] = UNLIKE
    return row


def _are_equal(column: torch.Tensor) -> bool:
    return bool((column == column[0]).all())


def fractions(amounts: Sequence[float]) -> tuple[float, ...]:
    """Returns amounts over their sum; equal fractions if the sum is 0."""
    total = sum(amounts)
    return tuple(amount / total if total else 1 / len(amounts) for amount in amounts)
