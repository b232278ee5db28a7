"""One agreement across nodes: a vote, the check that replicas hold the same parameters, and the averages."""

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypedDict, final

import torch

from evenly.comm import CollectiveWaiter, Group, Groups, gather_json
from evenly.errors import MismatchError
from evenly.exchange.anchors import Anchors, of_node
from evenly.exchange.buffers import Buffers
from evenly.exchange.membership import Membership
from evenly.exchange.payload import Payload
from evenly.exchange.pending import ExchangeOutcome, Tensors
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.exchange.tensors.fingerprint import Fingerprint, apart, are_apart
from evenly.exchange.votes import Quorum, Vote
from evenly.schedule.step_counter import Schedule
from evenly.spec import EverySeconds, Exchange

logger = logging.getLogger(__name__)

FiniteCheck = Callable[[], None]  # raises if the gradients of the last step were not finite

INSIDE = (
    "They must be equal after every step. Something has changed them on some ranks only: gradients or parameters set "
    "by hand, other settings or state of the optimizer, a random number. Nothing was merged. Do the same on all ranks "
    "of a node."
)
ACROSS = (
    "Nodes must be equal after an exchange, and no step of the optimizer that synchronize was given came since: "
    "something else has changed parameters. Nothing was merged. Train with that optimizer, or load the same parameters "
    "on all ranks."
)
GLOBAL_GRADIENTS = (
    "Ranks that average all gradients must be equal after every step. Something has changed parameters on some ranks "
    "only: by hand, by other settings or state of the optimizer. Nothing was merged. Do the same on all ranks."
)


# What each rank sends to the others when ranks are apart, as JSON.
RankReport = TypedDict(
    "RankReport",
    {
        "holds": list[tuple[str, float, float, int]],  # name, fingerprint, rounding unit and elements of each tensor
        "platform": float,
        "settings": list[dict[str, str]],  # of the optimizer, by parameter group
        "with": list[int],  # the ranks that hold the network together with this one
    },
)


@final
class Agreement:
    """Runs the collectives of an exchange: all ranks vote, and average payloads and buffers if the vote allows it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        groups: Groups,
        membership: Membership,
        replica_exchange: ReplicaExchange,
        settings: Exchange,
        anchors: Anchors,
        buffers: Buffers,
        averages: bool,
        global_gradients: bool,
        device: torch.device,
    ) -> None:
        self.is_assembled = True  # all ranks took part in the last one from the same call
        self._schedule = schedule
        self._groups = groups
        self._membership = membership
        self._replica_exchange = replica_exchange
        self._settings = settings
        self._anchors = anchors
        self._buffers = buffers
        self._averages = averages
        self._global_gradients = global_gradients
        self._device = device
        self._divergence = DivergenceCheck(optimizer, groups, replica_exchange, global_gradients=global_gradients)

    @property
    def compares_replicas(self) -> bool:
        """Whether every exchange compares this rank's parameters with those of other ranks."""
        return self._global_gradients or len(self._replica_exchange.holders) > 1

    def reach(
        self,
        payload: Payload,
        vote: Vote,
        snapshot: Tensors,
        waiter: CollectiveWaiter,
        *,
        fingerprint: Fingerprint,
        since: int,
        exact: bool = False,
        check_finite: FiniteCheck | None = None,
    ) -> ExchangeOutcome | None:
        """Returns the agreed outcome; None if ranks only assembled and no parameters differ."""
        if check_finite is not None:
            check_finite()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # excludes steps queued before from the measured time
        return self._membership.settle(
            partial(
                self._attempt,
                vote=vote,
                snapshot=snapshot,
                waiter=waiter,
                fingerprint=fingerprint,
                since=since,
                exact=exact,
                began=time.monotonic(),
            ),
            payload,
        )

    def _attempt(
        self,
        payload: Payload,
        *,
        vote: Vote,
        snapshot: Tensors,
        waiter: CollectiveWaiter,
        fingerprint: Fingerprint,
        since: int,
        exact: bool,
        began: float,
    ) -> ExchangeOutcome | None:
        """Averages `payload` in place; where nodes may be lost meanwhile, it is a copy, and may be tried again."""
        buffer_changes, membership = self._buffers.changes(snapshot), self._membership
        quorum = self.vote(replace(vote, changed=buffer_changes.bits()), fingerprint, waiter, since=since)
        self.is_assembled = quorum.is_assembled
        if quorum.is_assembled and not quorum.may_differ and isinstance(self._schedule.period, EverySeconds):
            return None
        joined = time.monotonic()  # all ranks have joined
        if membership.adopts_buffers:  # nodes have agreed on other values meanwhile
            counts = membership.received is None
            values = snapshot if counts else {name: self._buffers.agreed[name] for name in snapshot}
            buffer_changes = self._buffers.changes(values)
        keys, added = buffer_changes.split(quorum.changed)
        self._replica_exchange.agree_on_largest(keys, waiter, across=membership.across)
        exact = exact and quorum.is_assembled
        stats = self._replica_exchange.average(
            payload, added, quorum, waiter, anchors=self._anchors, exact=exact, across=membership.across
        )
        if len(quorum.weights) > 1 and self._averages:
            stats = of_node(stats, self._groups.node_votes, waiter)
        agreed, seconds = buffer_changes.agreed(keys, added), time.monotonic() - joined
        membership.conclude(payload, agreed, waiter)
        return ExchangeOutcome(quorum.weights, stats, seconds, joined - began, quorum.measured, agreed)

    def vote(
        self, vote: Vote, fingerprint: Fingerprint, waiter: CollectiveWaiter, *, since: int, everywhere: bool = False
    ) -> Quorum:
        """Returns the quorum after checking that ranks which must hold equal parameters do."""
        vote = replace(vote, fingerprint=fingerprint.read(), holders=self._replica_exchange.holders)
        quorum = self._membership.hold_vote(vote, waiter)
        everywhere = everywhere and not quorum.may_differ
        if not self._averages or self._settings.overlap:
            since = vote.step  # no exchange made the ranks of a node bit-identical since the start
        self._divergence.require_same(quorum, fingerprint, waiter, step=vote.step, since=since, everywhere=everywhere)
        return quorum


class DivergenceCheck:
    """Compares the fingerprints of ranks and finds the first parameter that differs."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Groups,
        replica_exchange: ReplicaExchange,
        *,
        global_gradients: bool,
    ) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._replica_exchange = replica_exchange
        self._global_gradients = global_gradients
        self._has_warned = False

    def require_same(
        self,
        quorum: Quorum,
        fingerprint: Fingerprint,
        waiter: CollectiveWaiter,
        *,
        step: int,
        since: int,
        everywhere: bool,
    ) -> None:
        """Raises `MismatchError` if replicas of this node differ or, where they must not, those of different nodes.

        `fingerprint` is this rank's. All ranks that see the difference call it together. Rounding may differ in the
        `since` steps since they were equal.
        """
        self._warn_of_rates(quorum, step=step)
        node, world = self._groups.node_votes, self._groups.world
        if are_apart(quorum.fingerprints, fingerprint.elements, steps=since):
            ranks = dict(enumerate(self._groups.ranks))
            self._raise_mismatch(fingerprint, ranks, node, waiter, INSIDE, step=step, since=since)
        if (everywhere or self._global_gradients) and are_apart(
            quorum.node_fingerprints, fingerprint.elements, steps=since
        ):
            why, ranks = (
                GLOBAL_GRADIENTS if self._global_gradients else ACROSS,
                dict(enumerate(range(self._groups.world.size()))),
            )
            self._raise_mismatch(fingerprint, ranks, world, waiter, why, step=step, since=since)

    def _warn_of_rates(self, quorum: Quorum, *, step: int) -> None:
        """Warns once if nodes train with different learning rates: often a scheduler follows one node's loss."""
        if self._has_warned or len(set(quorum.learning_rates)) < 2:
            return
        self._has_warned = True
        if self._groups.rank == 0:
            rates = ", ".join(f"node {node}: {rate:g}" for node, rate in enumerate(quorum.learning_rates))
            logger.warning(
                "nodes have different learning rates at step %d (%s); their parameters are averaged nevertheless. If a "
                "scheduler follows a loss, give it the mean of all nodes",
                step,
                rates,
            )

    def _raise_mismatch(
        self,
        fingerprint: Fingerprint,
        ranks: dict[int, int],
        group: Group,
        waiter: CollectiveWaiter,
        why: str,
        *,
        step: int,
        since: int,
    ) -> None:
        report: RankReport = {
            "holds": fingerprint.by_tensor(),
            "platform": fingerprint.read().platform,
            "settings": [_settings(group) for group in self._optimizer.param_groups],
            "with": [self._groups.ranks[local_rank] for local_rank in self._holders()],
        }
        rows = {ranks[member]: row for member, row in enumerate(gather_json(report, group, waiter))}
        networks = sorted({tuple(row["with"]) for row in rows.values()})
        name, others = _first_difference(networks, rows, since=since)
        raise MismatchError(
            f"ranks {list(networks[0])} and {others} held different parameters after step {step}: {name!r} is the "
            f"first that differs{_other_settings(rows)}. {why}"
        )

    def _holders(self) -> tuple[int, ...]:
        local_rank = self._groups.local_rank
        return next((holders for holders in self._replica_exchange.holders if local_rank in holders), (local_rank,))


def _first_difference(
    networks: Sequence[tuple[int, ...]], rows: dict[int, RankReport], *, since: int
) -> tuple[str, list[int]]:
    """Returns the first parameter that differs between networks, and the ranks that differ from the first."""
    is_alike = all(row["platform"] == rows[networks[0][0]]["platform"] for row in rows.values())
    for index, (name, *_) in enumerate(rows[networks[0][0]]["holds"]):
        parts = [[rows[rank]["holds"][index] for rank in ranks] for ranks in networks]
        values = [math.fsum(value for _, value, *_ in part) for part in parts]
        units = [max(unit for _, _, unit, _ in part) for part in parts]
        elements = parts[0][0][3] if is_alike else 0
        if differing := apart(values, units, steps=since, alike=elements):
            return name, [rank for network in differing for rank in networks[network]]
    return "some", [rank for ranks in networks[1:] for rank in ranks]


def _settings(group: dict[str, object]) -> dict[str, str]:
    return {key: repr(value) for key, value in sorted(group.items()) if key != "params"}


def _other_settings(rows: dict[int, RankReport]) -> str:
    """Returns a text on the first setting of the optimizer that differs between ranks."""
    (first, reference), *others = ((rank, row["settings"]) for rank, row in rows.items())
    for rank, settings in others:
        if json.dumps(settings) != json.dumps(reference):
            for number, (ours, theirs) in enumerate(zip(reference, settings, strict=False)):
                for key in ours.keys() & theirs.keys():
                    if ours[key] != theirs[key]:
                        values = f"{ours[key]} on rank {first} and {theirs[key]} on rank {rank}"
                        return f"; the optimizer's setting {key!r} of group {number} is {values}"
    return ""
