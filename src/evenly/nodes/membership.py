"""Who takes part in an exchange, with what weight, over which groups."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from evenly._errors import LockstepError
from evenly.comm import Groups, Peers, Waiter, all_gather


@dataclass(frozen=True)
class Ballot:
    """What a rank brings to an exchange: where it stands and the samples it has used since the last one."""

    step: int
    exchange: int
    samples: float
    layout: int  # hash of what it is about to send


@dataclass(frozen=True)
class Quorum:
    """Who takes part: weights by node (they sum to 1), this rank's weight in its node, and the groups to reduce in."""

    weights: tuple[float, ...]
    node: int
    share: float
    peers: tuple[Peers, ...]


class Membership(ABC):
    """Answers before every exchange who takes part in it."""

    @abstractmethod
    def convene(self, ballot: Ballot, waiter: Waiter) -> Quorum:
        """Returns the quorum of the coming exchange; all ranks that take part call it together."""


class StaticMembership(Membership):
    """One world: the nodes given at the start take part in every exchange."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def convene(self, ballot: Ballot, waiter: Waiter) -> Quorum:
        """Returns all nodes, each weighted by its samples since the last exchange."""
        groups = self._groups
        row = torch.tensor([ballot.step, ballot.exchange, ballot.layout, ballot.samples], dtype=torch.float64)
        device = _device_of(groups)
        siblings, work = all_gather(row.to(device), groups.node)  # [ranks of the node, 4]
        waiter.wait([work])
        siblings = siblings.cpu()
        self._require_lockstep(siblings, groups.ranks, "rank")
        samples = float(siblings[:, 3].sum())
        row[3] = samples
        votes = [all_gather(row.to(device), peers.group) for peers in groups.peers]  # each [nodes, 4]
        waiter.wait([work for _, work in votes])
        for rows, _ in votes:
            self._require_lockstep(rows.cpu(), range(len(groups.nodes)), "node")
        return Quorum(
            weights=_fractions(votes[0][0].cpu()[:, 3].tolist()),
            node=groups.index,
            share=_fractions(siblings[:, 3].tolist())[groups.local_rank],
            peers=groups.peers,
        )

    def _require_lockstep(self, rows: torch.Tensor, names: "tuple[int, ...] | range", kind: str) -> None:
        if bool((rows[:, :3] == rows[0, :3]).all()):
            return
        stands = ", ".join(
            f"{kind} {name}: step {int(row[0])}, exchange {int(row[1])}" for name, row in zip(names, rows, strict=True)
        )
        cause = "have unequal numbers of steps" if not bool((rows[:, 0] == rows[0, 0]).all()) else "send other tensors"
        raise LockstepError(
            f"{kind}s met for an exchange but {cause} ({stands}). "
            "Give every rank the same number of batches and the same calls of step, end_epoch and finish."
        )


def _device_of(groups: Groups) -> torch.device:
    served = groups.node._device_types
    return torch.device("cpu") if any(device.type == "cpu" for device in served) else served[0]


def _fractions(amounts: list[float]) -> tuple[float, ...]:
    total = sum(amounts)
    return tuple(amount / total if total else 1 / len(amounts) for amount in amounts)
