"""The exchanges of one network across nodes: begun after agreed steps, merged after agreed steps."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch

from evenly.comm import CollectiveWaiter, FailureMonitor, Groups
from evenly.errors import CheckpointError
from evenly.exchange.anchors import Anchors, of_node
from evenly.exchange.averager import Averager
from evenly.exchange.background import BackgroundExchange
from evenly.exchange.buffers import Buffers
from evenly.exchange.contents import PayloadBuilder
from evenly.exchange.divergence import DivergenceCheck, learning_rate
from evenly.exchange.loaded_weights import LoadedWeights
from evenly.exchange.membership import Membership, Quorum, Vote
from evenly.exchange.payload import Payload
from evenly.exchange.pending import ExchangeOutcome, ExchangeSummary, PendingExchange, Tensors, restored
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.exchange.tensors.fingerprint import Fingerprint
from evenly.schedule.adaptive import ExchangeCosts, StepPace, choose
from evenly.schedule.step_counter import Schedule
from evenly.spec import Adaptive, EverySeconds, Exchange

logger = logging.getLogger(__name__)

CLOSING_S = 2.0  # for an exchange under way when nobody waits for it any more
SETTINGS = ("fragments", "codec", "outer", "optimizer_state", "state_every")  # binding for a checkpoint in a period

Look = Callable[[], None]  # raises if the gradients of the last step were not finite


@final
class Exchanger(Averager):
    """Begins and merges the exchanges of one network, and remembers what the nodes have agreed on."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        groups: Groups,
        membership: Membership,
        replica_exchange: ReplicaExchange,
        settings: Exchange,
        monitor: FailureMonitor,
        joint: bool,
        before: Callable[[], Look],
    ) -> None:
        self.on_exchange: list[Callable[[ExchangeSummary], None]] = []
        self.on_period: list[Callable[[int, int, str], None]] = []  # called with step, steps of the next period, why
        self.doubtful = False
        self.buffers = Buffers(module, settings, replica_exchange, alone=groups.rank_group.size == 1)
        self._module = module
        self._optimizer = optimizer
        self._schedule = schedule
        self._groups = groups
        self._membership = membership
        self._replica_exchange = replica_exchange
        self._settings = settings
        self._monitor = monitor
        self._before = before
        self._averages = len(groups.nodes) > 1 and not joint  # parameters, which else never differ
        self._samples = [0.0] * settings.fragments  # of this rank since the last snapshot of each fragment
        self._counts = [0] * settings.fragments  # snapshots of each fragment
        self._meetings = 0  # with other nodes, of any kind
        self._pending_exchanges: list[PendingExchange] = []  # under way
        self._anchors = Anchors(settings)
        self._step_pace = StepPace()
        self._seen = ExchangeCosts()  # by this rank, of its last exchange
        self._payload_builder = PayloadBuilder(module, optimizer, replica_exchange, settings, travels=self._averages)
        self._divergence = DivergenceCheck(optimizer, groups, replica_exchange, joint=joint)
        self._loaded_weights, self._restarts = (
            LoadedWeights(module, optimizer),
            0,
        )  # how often points began anew from loaded weights
        self._is_assembled = True  # all ranks have come where the last exchange was made
        self._differs = False  # what was merged as a change left nodes different in the last bits
        self._device = next(module.parameters(), torch.empty(0)).device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch has no annotation here

    def begin(self, *, verified: bool = True) -> None:
        """Remembers the values with which all nodes start or go on; if not `verified`, the next exchange compares."""
        self._payload_builder.forget()
        self._loaded_weights.forget()
        if self._anchors.are_kept:
            self._anchors.begin(self._payload_builder.load(range(self._settings.fragments)).parts, verified=verified)

    @property
    def samples(self) -> float:
        """The samples of this rank since the oldest of the last snapshots."""
        return max(self._samples)

    def count(self, samples: float) -> None:
        """Adds the samples of a step."""
        self._samples = [before + samples for before in self._samples]

    def after_step(self, due: Sequence[int]) -> None:
        """Merges what is to be merged after the step just made, then exchanges the fragments that are due."""
        self._step_pace.end()
        with self._reporting():
            for pending_exchange in [
                pending_exchange
                for pending_exchange in self._pending_exchanges
                if pending_exchange.due <= self._schedule.step
            ]:
                self._merge(pending_exchange)
            if due:
                self.exchange(due, waits=self._schedule.warms_up)
        self._step_pace.begin(beside=bool(self._pending_exchanges))

    def exchange(self, fragments: Sequence[int], *, waits: bool = False, exact: bool = False) -> None:
        """Exchanges `fragments`: takes their snapshot, and merges now or after the steps that overlap with it.

        Several fragments are weighted by the samples since the oldest of their snapshots.
        """
        self.take_loaded()
        if self._groups.rank_group.size == 1:
            self._schedule.exchanged(fragments)
            self._forget_samples(fragments)
            self.buffers.learn()
            return
        with self._reporting():
            for pending_exchange in [
                pending_exchange
                for pending_exchange in self._pending_exchanges
                if waits or set(pending_exchange.fragments) & set(fragments)
            ]:
                self._merge(pending_exchange)
            overlap = 0 if waits else self._settings.overlap
            look = self._before()
            pending_exchange, vote, held = self._depart(tuple(fragments), overlap=overlap)
            self._schedule.exchanged(fragments)
            self._forget_samples(fragments)
            vote = replace(vote, ends=exact)
            agree = partial(
                self._agree,
                pending_exchange.payload,
                vote,
                pending_exchange.snapshot,
                held=held,
                since=pending_exchange.steps,
                look=look,
            )
            if overlap == 0:
                if self._stream is not None:
                    torch.cuda.current_stream(self._device).synchronize()
                began = time.monotonic()
                pending_exchange.outcome = self._met(partial(agree, exact=exact), pending_exchange.place)
                self._unload(pending_exchange, time.monotonic() - began)
            else:
                self._fly(pending_exchange, agree)

    def _fly(
        self, pending_exchange: PendingExchange, agree: "Callable[[CollectiveWaiter], ExchangeOutcome | None]"
    ) -> None:
        if self._stream is not None:
            self._anchors.used_on(self._stream, pending_exchange.fragments)
        after = self._pending_exchanges[-1].background if self._pending_exchanges else None
        act = partial(agree, self._waiter(pending_exchange.place, tells=False))
        pending_exchange.background = BackgroundExchange(act, monitor=self._monitor, stream=self._stream, after=after)
        self._pending_exchanges.append(pending_exchange)

    @property
    def remembers(self) -> bool:
        """Whether more than the network itself is known of the last exchanges."""
        return bool(self._pending_exchanges) or (self._averages and self._anchors.are_kept)

    def finish(self) -> None:
        """Lets all ranks go on with the same model."""
        self.take_loaded()
        with self._reporting():
            self.merge_all()
            if isinstance(self._schedule.period, EverySeconds):
                self.assemble()
            if self._schedule.since:
                self.exchange(range(self._settings.fragments), waits=True, exact=True)
            else:
                self._average_rest()

    def assemble(self) -> None:
        """Exchanges until all nodes have come here: some may have exchanges to make before they do."""
        self._is_assembled = False
        while not self._is_assembled:
            self.exchange(range(self._settings.fragments), waits=True, exact=True)

    def merge_all(self) -> None:
        """Merges all that is under way, at once."""
        for pending_exchange in list(self._pending_exchanges):
            self._merge(pending_exchange)

    def close(self) -> bool:
        """Lets what is under way end by itself; returns whether it has."""
        self._loaded_weights.close()
        backgrounds = [
            pending_exchange.background
            for pending_exchange in self._pending_exchanges
            if pending_exchange.background is not None
        ]
        landed = not backgrounds or backgrounds[-1].ends_within(CLOSING_S)  # the others are before it
        steps, pending_exchanges = self._schedule.since if self._averages else 0, len(self._pending_exchanges)
        if (steps or pending_exchanges) and not self._monitor.has_failed:
            case = (
                f"{pending_exchanges} exchanges under way are dropped"
                if pending_exchanges
                else f"{steps} steps came after an exchange"
            )
            logger.warning("%s, so nodes hold different parameters: call finish() before close()", case)
        return landed

    def check(self) -> None:
        """Raises what went wrong in an exchange under way."""
        for pending_exchange in self._pending_exchanges:
            if pending_exchange.background is not None:
                pending_exchange.background.check()

    def meet(self, act: "Callable[[CollectiveWaiter], Any]", place: str = "") -> Any:
        """Returns act's result; an error on this rank is told to the others before it is raised."""
        with self._reporting():
            self._before()()
            return self._met(act, place or self._next_place())

    def _met(self, act: "Callable[[CollectiveWaiter], Any]", place: str) -> Any:
        if self._stream is not None:
            self._anchors.used_on(torch.cuda.current_stream(self._device), range(self._settings.fragments))
        with torch.no_grad():
            result = act(self._waiter(place))
        self._monitor.passed(place)
        return result

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Tells an error on this rank to the others before it is raised."""
        try:
            yield
        except Exception as error:
            self._monitor.report(error)
            raise

    def progress(self) -> dict[str, Any]:
        """Returns where this rank stands between exchanges."""
        self.take_loaded()  # samples before a load no longer count
        self._step_pace.drop()  # a checkpoint is made
        counted = {"samples": list(self._samples), "counts": list(self._counts)}
        return {**counted, "seen": list(self._seen.row[1:]), "differs": self._differs}

    def state(self) -> dict[str, Any]:
        """Returns all tensors that a checkpoint needs to go on inside a period, with what is under way."""
        self.take_loaded()
        with self._reporting():
            self._drain()
        pending_exchanges = [pending_exchange.saved() for pending_exchange in self._pending_exchanges]
        return {
            "settings": self._bound_settings(),
            "policies": dict(self.buffers.policies),
            "restarts": self._restarts,
            "points": self._anchors.state(),
            "trips": pending_exchanges,
        }

    def resume(self, progress: dict[str, Any], state: dict[str, Any] | None, agreed: Tensors | None) -> None:
        """Goes on from a checkpoint; without one of its own from what is in the module now."""
        count = self._settings.fragments
        samples, counts = list(progress["samples"]), list(progress["counts"])
        self._samples = samples if len(samples) == count else [max(samples)] * count
        self._counts = counts if len(counts) == count else [max(counts)] * count
        self._seen = ExchangeCosts(0.0, *progress["seen"])
        self._differs = progress.get("differs", False)
        self.buffers.learn(agreed)
        self._loaded_weights.forget()
        settings = self._bound_settings()
        if state is None or state["settings"] != settings or not self._anchors.fit(state["points"]):
            if state is not None and (self._schedule.since or state["trips"]):
                was = {name: value for name, value in state["settings"].items() if value != settings[name]}
                case = f"with other settings of the exchange, {was}" if was else "with another cut of the network"
                raise CheckpointError(
                    f"the checkpoint was made between two exchanges, {case}. Go on with those to the next exchange."
                )
            self.begin(verified=False)
            return
        self._restarts = state["restarts"]
        self._anchors.resume(state["points"])
        self._pending_exchanges = [self._restored(saved) for saved in state["trips"]]

    def _bound_settings(self) -> dict[str, Any]:
        fields = self._settings.model_dump(mode="json")
        return {name: fields[name] for name in SETTINGS}

    def _depart(self, fragments: tuple[int, ...], *, overlap: int) -> tuple[PendingExchange, Vote, Fingerprint]:
        for fragment in fragments:
            self._counts[fragment] += 1
        stateful = tuple(f for f in fragments if self._counts[f] % self._settings.state_every == 0)
        payload = self._payload_builder.load(fragments, stateful=stateful, change=overlap > 0)
        snapshot = self.buffers.snapshot() if self._settings.fragments - 1 in fragments else {}
        layout = f"{self._restarts} restarts\n{self._payload_builder.words(fragments, snapshot, stateful=stateful)}"
        samples = max(self._samples[fragment] for fragment in fragments)
        vote = self._ballot(layout, samples=samples)
        held = self._payload_builder.fingerprint(fragments)
        step, number = self._schedule.step, self._schedule.exchanges + 1
        steps, place = self._schedule.since_of(fragments), self._next_place()
        pending_exchange = PendingExchange(
            number, step, step + overlap, fragments, stateful, steps, place, payload, snapshot
        )
        return pending_exchange, vote, held

    def _ballot(self, layout: str, *, samples: float) -> Vote:
        code = int.from_bytes(hashlib.sha256(layout.encode()).digest()[:6])  # exact in a float64
        at, seen = self._schedule, replace(self._seen, step_s=self._step_pace.median_s)
        return Vote(
            step=at.step,
            exchange=at.exchanges,
            samples=samples,
            layout=code,
            backwards=self._monitor.begun,
            measured=seen.row,
            doubtful=self.doubtful,
            differs=self._differs or at.since > 0,
        )

    def _agree(
        self,
        payload: Payload,
        vote: Vote,
        snapshot: Tensors,
        waiter: CollectiveWaiter,
        *,
        held: Fingerprint,
        since: int,
        exact: bool = False,
        look: Look | None = None,
    ) -> ExchangeOutcome | None:
        """Returns what all ranks have agreed on; nothing where they only came together, and had nothing to tell."""
        if look is not None:
            look()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()  # steps queued before are no part of the exchange
        began = time.monotonic()
        moves = self.buffers.moves(snapshot)
        quorum = self._convene(replace(vote, changed=moves.bits()), held, waiter, since=since)
        self._is_assembled = quorum.ends
        if quorum.ends and not quorum.differs and isinstance(self._schedule.period, EverySeconds):
            return None
        met = time.monotonic()  # from here on nobody waits for a slower rank
        counters, added = moves.split(quorum.changed)
        self._replica_exchange.agree_on_largest(counters, waiter)
        exact = exact and quorum.ends
        carried = self._replica_exchange.carry(payload, added, quorum, waiter, points=self._anchors, exact=exact)
        if len(quorum.weights) > 1 and self._averages:
            carried = of_node(carried, self._groups.node_votes, waiter)
        agreed, seconds = moves.agreed(counters, added), time.monotonic() - met
        return ExchangeOutcome(quorum.weights, carried, seconds, met - began, quorum.measured, agreed)

    def _convene(
        self, vote: Vote, held: Fingerprint, waiter: CollectiveWaiter, *, since: int, everywhere: bool = False
    ) -> Quorum:
        """Returns who takes part, once it is sure that ranks which must hold the same parameters do."""
        rate = learning_rate(self._optimizer)
        vote = replace(vote, held=held.read(), holders=self._replica_exchange.holders, learning_rate=rate)
        quorum = self._membership.hold_vote(vote, waiter)
        everywhere = everywhere and not quorum.differs
        if not self._averages or self._settings.overlap:
            since = vote.step  # ranks of a node were never given the same bits since the start
        self._divergence.require_same(quorum, held, waiter, step=vote.step, since=since, everywhere=everywhere)
        return quorum

    def _merge(self, pending_exchange: PendingExchange) -> None:
        began = time.monotonic()
        self._await(pending_exchange)
        pending_exchange.background = None  # what it holds is free now, not when a cycle is found
        self._pending_exchanges.remove(pending_exchange)
        self._unload(pending_exchange, time.monotonic() - began)

    def _unload(self, pending_exchange: PendingExchange, waited_s: float) -> None:
        outcome = pending_exchange.outcome
        if outcome is None:
            return
        with torch.no_grad():
            self._payload_builder.unload(pending_exchange.payload)
            self.buffers.put(outcome.buffers, pending_exchange.snapshot, change=pending_exchange.payload.change)
        self._differs = pending_exchange.payload.change
        if self._stream is not None:
            for buffer in outcome.buffers.values():  # of the other stream, and read on this one
                buffer.record_stream(torch.cuda.current_stream(self._device))
        if not pending_exchange.is_state_loaded:
            self._payload_builder.reset_state(pending_exchange.stateful)
        self._adapt(pending_exchange, outcome)
        for tell in self.on_exchange:
            tell(pending_exchange.told(outcome, self._schedule.step, waited_s))

    def _adapt(self, pending_exchange: PendingExchange, outcome: ExchangeOutcome) -> None:
        """Chooses the length of the next period; all ranks know the same, so they choose the same."""
        period, at = self._schedule.period, self._schedule
        if not isinstance(period, Adaptive) or not self._averages or pending_exchange.begun <= period.warmup:
            return
        transfer_s, slowed_s = self._step_pace.merged(outcome.seconds, slowed_s=self._seen.slowed_s)
        self._seen = ExchangeCosts(0.0, transfer_s, outcome.carried.drift, pending_exchange.steps, slowed_s)
        steps, why = choose(period, self._settings, at.next_length, ExchangeCosts(*outcome.measured))
        if steps != at.next_length:
            at.next_length = steps
            logger.info("after step %d: the next periods have %d steps: %s", at.step, steps, why)
            for tell in self.on_period:
                tell(at.step, steps, why)

    def _drain(self) -> None:
        """Waits until all that is under way has arrived; it is merged later."""
        for pending_exchange in self._pending_exchanges:
            self._await(pending_exchange)

    def _await(self, pending_exchange: PendingExchange) -> None:
        if pending_exchange.background is not None:
            pending_exchange.outcome = pending_exchange.background.wait(self._waiter(pending_exchange.place))
            self._monitor.passed(pending_exchange.place)
        for name, agreed in pending_exchange.drop_loaded().items():
            self.buffers.agreed[name] = agreed.clone()

    def _waiter(self, place: str, *, tells: bool = True) -> CollectiveWaiter:
        at, limit_s = self._schedule.step, self._settings.timeout_s
        return CollectiveWaiter(self._monitor, place=place, step=at, timeout_s=limit_s, tells=tells)

    def _next_place(self) -> str:
        self._meetings += 1
        return f"exchange {self._schedule.exchanges + 1} (meeting {self._meetings})"

    def _forget_samples(self, fragments: Sequence[int]) -> None:
        self.doubtful = False
        for fragment in fragments:
            self._samples[fragment] = 0.0

    def _restored(self, saved: dict[str, Any]) -> PendingExchange:
        payload = self._payload_builder.load(saved["fragments"], stateful=saved["stateful"], change=True)
        return restored(saved, payload, self._next_place(), self._device)
