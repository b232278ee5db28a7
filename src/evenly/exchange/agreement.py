"""One agreement across nodes: a vote, the check that replicas are equal, and the averages."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch

from evenly.comm import CollectiveWaiter, Groups, learning_rate
from evenly.exchange.anchors import Anchors, of_node
from evenly.exchange.buffers import Buffers
from evenly.exchange.divergence import DivergenceCheck
from evenly.exchange.membership import Membership, Quorum, Vote
from evenly.exchange.payload import Payload
from evenly.exchange.pending import ExchangeOutcome, Tensors
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.exchange.tensors.fingerprint import Fingerprint
from evenly.schedule.step_counter import Schedule
from evenly.spec import EverySeconds, Exchange

FiniteCheck = Callable[[], None]  # raises if the gradients of the last step were not finite


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
        self._optimizer = optimizer
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
        began = time.monotonic()
        buffer_changes = self._buffers.changes(snapshot)
        quorum = self.vote(replace(vote, changed=buffer_changes.bits()), fingerprint, waiter, since=since)
        self.is_assembled = quorum.is_assembled
        if quorum.is_assembled and not quorum.may_differ and isinstance(self._schedule.period, EverySeconds):
            return None
        joined = time.monotonic()  # all ranks have joined
        counters, added = buffer_changes.split(quorum.changed)
        self._replica_exchange.agree_on_largest(counters, waiter)
        exact = exact and quorum.is_assembled
        stats = self._replica_exchange.average(payload, added, quorum, waiter, anchors=self._anchors, exact=exact)
        if len(quorum.weights) > 1 and self._averages:
            stats = of_node(stats, self._groups.node_votes, waiter)
        agreed, seconds = buffer_changes.agreed(counters, added), time.monotonic() - joined
        return ExchangeOutcome(quorum.weights, stats, seconds, joined - began, quorum.measured, agreed)

    def vote(
        self, vote: Vote, fingerprint: Fingerprint, waiter: CollectiveWaiter, *, since: int, everywhere: bool = False
    ) -> Quorum:
        """Returns the quorum after checking that ranks which must hold equal parameters do."""
        rate = learning_rate(self._optimizer)
        vote = replace(vote, fingerprint=fingerprint.read(), holders=self._replica_exchange.holders, learning_rate=rate)
        quorum = self._membership.hold_vote(vote, waiter)
        everywhere = everywhere and not quorum.may_differ
        if not self._averages or self._settings.overlap:
            since = vote.step  # no exchange made the ranks of a node bit-identical since the start
        self._divergence.require_same(quorum, fingerprint, waiter, step=vote.step, since=since, everywhere=everywhere)
        return quorum
