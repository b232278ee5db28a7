"""Runs the exchanges of one network across nodes; all ranks begin and merge them after the same steps."""

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar, final

import torch

from evenly.comm import CollectiveWaiter, FailureMonitor, Groups, learning_rate
from evenly.comm.nested_state import flatten
from evenly.errors import CheckpointError, CoordinatorLostError, PeerError, SpecError
from evenly.exchange.agreement import Agreement, FiniteCheck
from evenly.exchange.anchors import Anchors
from evenly.exchange.buffers import Buffers
from evenly.exchange.exchange_state import ExchangeProgress, ExchangeState
from evenly.exchange.loaded_weights import LoadedWeights
from evenly.exchange.membership import ExchangeParts, Membership
from evenly.exchange.payload import Payload
from evenly.exchange.payload_builder import PayloadBuilder
from evenly.exchange.pending import (
    BackgroundExchange,
    ExchangeOutcome,
    ExchangeSummary,
    PendingExchange,
    PendingState,
    Tensors,
    restored,
    told,
)
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.exchange.state_transfer import JoinState
from evenly.exchange.tensors.fingerprint import NO_TENSORS, Fingerprint
from evenly.exchange.votes import Vote
from evenly.schedule.adaptive import ExchangeCosts, PeriodChooser
from evenly.schedule.step_counter import Schedule
from evenly.spec import EverySeconds, Exchange
from evenly.spec.plan import counted

logger = logging.getLogger(__name__)

RETRY_S = 0.1  # between attempts to reach the coordinator
CLOSING_S = 2.0  # how long close() waits for background exchanges
SETTINGS = ("fragments", "codec", "outer", "optimizer_state", "state_every")  # must be equal to resume inside a period

T = TypeVar("T")


class HiddenValues(NamedTuple):
    """The values of this node, while its module holds an average."""

    tensors: list[torch.Tensor]  # of the module
    values: list[torch.Tensor]
    agreed: Tensors  # the buffers after the last exchange
    may_differ: bool


@final
class Exchanger:
    """Begins and merges the exchanges of one network, and keeps the values that nodes agreed on.

    Outside the schedule it averages for evaluation, and restarts after `load_state_dict`.
    """

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
        global_gradients: bool,
        take_finite_check: Callable[[], FiniteCheck],
    ) -> None:
        self.on_exchange: list[Callable[[ExchangeSummary], None]] = []
        self.may_have_skipped_step = False  # by a scaler we were not given, since the last exchange
        self.buffers = Buffers(module, settings, replica_exchange, alone=groups.is_alone)
        self._module = module
        self._optimizer = optimizer
        self._device = next(module.parameters(), torch.empty(0)).device
        self._schedule = schedule
        self._groups = groups
        self._replica_exchange = replica_exchange
        self._settings = settings
        self._monitor = monitor
        self._take_finite_check = take_finite_check
        self._averages = groups.averages_parameters and not global_gradients  # parameters; otherwise these never differ
        self._samples = [0.0] * settings.fragments  # of this rank since the last snapshot of each fragment
        self._counts = [0] * settings.fragments  # snapshots of each fragment
        self._collectives = 0  # collectives with other nodes, of any kind
        self._pending_exchanges: list[PendingExchange] = []  # begun, not merged
        self._anchors = Anchors(settings)
        self.period_chooser = PeriodChooser(schedule, settings, is_active=self._averages)
        self._payload_builder = PayloadBuilder(module, optimizer, replica_exchange, settings, is_sent=self._averages)
        self._agreement = Agreement(
            optimizer,
            schedule,
            groups=groups,
            membership=membership,
            replica_exchange=replica_exchange,
            settings=settings,
            anchors=self._anchors,
            buffers=self.buffers,
            averages=self._averages,
            global_gradients=global_gradients,
            device=self._device,
        )
        self._membership = membership
        membership.bind(
            ExchangeParts(replica_exchange, self._payload_builder, self._anchors, self.buffers, self._training_state)
        )
        self._loaded_weights = LoadedWeights(module, optimizer)
        self._restarts = 0  # how often anchors were reset to loaded weights
        self._may_differ = False  # merged changes leave nodes different in the last bits
        self._hidden: HiddenValues | None = None  # this node's own values, while the module holds an average
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def reset_anchors(self, *, verified: bool = True) -> None:
        """Starts anew from the current values: anchors and fragments are made of them, loaded weights are forgotten.

        Unless `verified`, the next exchange compares the anchors between nodes.
        """
        self._payload_builder.lay_out()
        self._loaded_weights.forget()
        if self._anchors.are_kept:
            self._anchors.reset(
                self._payload_builder.snapshot(range(self._settings.fragments)).parts, verified=verified
            )

    def join(self) -> None:
        """Takes over the training that other nodes of an elastic run have begun, or begins it with them."""
        fragments = range(self._settings.fragments)
        flatten(self._training_state(), "state", {})  # another node may ask for it later
        payload, snapshot = self._payload_builder.snapshot(fragments), self.buffers.snapshot()
        vote = self._make_vote(self._description(fragments, snapshot), samples=0.0)
        reach = partial(self._agreement.reach, payload, vote, snapshot, fingerprint=NO_TENSORS, since=0)
        with self._reporting():
            outcome = self._run(reach, self._next_label())
            if outcome is None:
                raise PeerError(
                    "this node was to join an elastic run, but its coordinator cannot be reached. Start it with "
                    "`evenly coordinate`, and look at its address and the network."
                )
            self._take_over(payload, outcome.buffers, snapshot)

    def _take_over(self, payload: Payload, buffers: Tensors, snapshot: Tensors) -> None:
        """Writes averages and, where this node lacked state, that of another node."""
        with torch.no_grad():
            self._payload_builder.apply(payload)
            self.buffers.put(buffers, snapshot, change=payload.change)
            if self._membership.adopts_buffers:
                for name, buffer in self.buffers.now().items():
                    if name not in buffers:
                        buffer.copy_(self.buffers.agreed[name])
            if (state := self._membership.received) is not None:
                self._membership.received = None
                self._install(state)
            self._membership.deal_samples()

    def _training_state(self) -> dict[str, object]:
        """Returns what a joining node takes over, besides parameters and averaged buffers."""
        own_buffers = {n: b for n, b in self._module.named_buffers() if n not in self.buffers.agreed}
        return {
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.progress(),
            "counts": list(self._counts),
            "buffers": own_buffers,
            "samples": None if self._membership.samples is None else self._membership.samples.state(),
        }

    def _install(self, state: JoinState) -> None:
        training = state.training
        with self._loaded_weights.ignored():
            self._optimizer.load_state_dict(training["optimizer"])
        self._schedule.resume(training["schedule"])
        self._counts = list(training["counts"])
        self._samples = [0.0] * self._settings.fragments
        for name, buffer in self._module.named_buffers():
            if name in training["buffers"]:
                buffer.copy_(training["buffers"][name])

    def follow_parameters(self, trained: Collection[str]) -> None:
        """Takes over which parameters are trained from now on; the next exchange averages these.

        All ranks of the node call it together, before a step changes parameters that were frozen.
        """
        self._payload_builder.parameters.follow(trained)
        self._follow_layout()

    @property
    def samples(self) -> float:
        """The samples of this rank since the oldest of the last snapshots."""
        return max(self._samples)

    def count(self, samples: float) -> None:
        """Adds the samples of a step."""
        self._samples = [before + samples for before in self._samples]

    def after_step(self, due_fragments: Sequence[int]) -> None:
        """Merges the pending exchanges due after the step just made, then exchanges the fragments that are due."""
        self.period_chooser.pace.end()
        if due_fragments and self._membership.has_waiting:
            due_fragments = range(self._settings.fragments)
        if due_fragments or self._pending_exchanges:
            with self._reporting():
                for pending_exchange in [
                    pending_exchange
                    for pending_exchange in self._pending_exchanges
                    if pending_exchange.merge_step <= self._schedule.step
                ]:
                    self._merge(pending_exchange)
                if due_fragments:
                    self.exchange(due_fragments, waits=self._schedule.warms_up or self._membership.has_waiting)
        self.period_chooser.pace.begin(during_exchange=bool(self._pending_exchanges))

    def exchange(self, fragments: Sequence[int], *, waits: bool = False, exact: bool = False) -> None:
        """Exchanges `fragments`: takes a snapshot, and merges now or after the overlapping steps.

        Several fragments are weighted by the samples since the oldest of their snapshots.
        """
        self.take_loaded()
        if self._groups.is_alone:
            self._schedule.record_begun(fragments)
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
            check_finite = self._take_finite_check()
            self._follow_layout()
            pending_exchange, vote, fingerprint = self._prepare(tuple(fragments), overlap=overlap)
            self._schedule.record_begun(fragments)
            self._forget_samples(fragments)
            is_whole = overlap == 0 and len(fragments) == self._settings.fragments
            vote = replace(vote, waits_for_all=exact, is_whole=is_whole)
            agree = partial(
                self._agreement.reach,
                pending_exchange.payload,
                vote,
                pending_exchange.snapshot,
                fingerprint=fingerprint,
                since=pending_exchange.steps,
                check_finite=check_finite,
            )
            if overlap == 0:
                if self._stream is not None:
                    torch.cuda.current_stream(self._device).synchronize()
                began = time.monotonic()
                pending_exchange.outcome = self._run(partial(agree, exact=exact), pending_exchange.label)
                self._apply(pending_exchange, time.monotonic() - began)
            else:
                self._run_in_background(pending_exchange, agree)

    def _run_in_background(
        self, pending_exchange: PendingExchange, agree: Callable[[CollectiveWaiter], ExchangeOutcome | None]
    ) -> None:
        if self._stream is not None:
            self._anchors.used_on(self._stream, pending_exchange.fragments)
        after = self._pending_exchanges[-1].background if self._pending_exchanges else None
        act = partial(agree, self._waiter(pending_exchange.label, reports=False))
        pending_exchange.background = BackgroundExchange(act, monitor=self._monitor, stream=self._stream, after=after)
        self._pending_exchanges.append(pending_exchange)

    @property
    def has_pending_or_anchors(self) -> bool:
        """Whether there are pending exchanges, or anchors."""
        return bool(self._pending_exchanges) or (self._averages and self._anchors.are_kept)

    def finish(self) -> None:
        """Gives all ranks the same model."""
        self.take_loaded()
        with self._reporting():
            self.merge_all()
            if isinstance(self._schedule.period, EverySeconds):
                self.wait_for_all_nodes()
            if self._membership.is_elastic:
                self._finish_elastic()
            elif self._schedule.since:
                self.exchange(range(self._settings.fragments), waits=True, exact=True)
            else:
                self._average_rest()

    def _finish_elastic(self) -> None:
        """Makes an exchange with the nodes that are there, also if the coordinator has to come back first."""
        deadline = time.monotonic() + self._settings.timeout_s
        while self._schedule.since or self._may_differ:
            self.exchange(range(self._settings.fragments), waits=True, exact=True)
            if not self._membership.is_cut_off:
                return
            self._monitor.check()
            if time.monotonic() > deadline:
                raise CoordinatorLostError(
                    f"the average of all nodes was asked for, but the coordinator was not reached for "
                    f"{self._settings.timeout_s:g} s. This node keeps its own parameters; look at the coordinator."
                )
            time.sleep(RETRY_S)

    def wait_for_all_nodes(self) -> None:
        """Exchanges until all nodes call this: some may have other exchanges to make before."""
        self._agreement.is_assembled = False
        while not self._agreement.is_assembled:
            self.exchange(range(self._settings.fragments), waits=True, exact=True)

    def merge_all(self) -> None:
        """Merges all pending exchanges now."""
        for pending_exchange in list(self._pending_exchanges):
            self._merge(pending_exchange)

    def close(self, *, may_differ: bool = False) -> bool:
        """Waits shortly for background exchanges; returns whether they ended.

        Logs a warning if nodes hold different parameters, unless they `may_differ`.
        """
        self._loaded_weights.close()
        backgrounds = [
            pending_exchange.background
            for pending_exchange in self._pending_exchanges
            if pending_exchange.background is not None
        ]
        have_ended = not backgrounds or backgrounds[-1].ends_within(CLOSING_S)  # they run in order
        steps, pending_exchanges = self._schedule.since if self._averages else 0, len(self._pending_exchanges)
        if (steps or pending_exchanges) and not may_differ and not self._monitor.has_failed:
            case = (
                f"{counted(pending_exchanges, 'pending exchange')} {'is' if pending_exchanges == 1 else 'are'} dropped"
                if pending_exchanges
                else f"{counted(steps, 'step')} came after an exchange"
            )
            logger.warning("%s, so nodes hold different parameters: call finish() before close()", case)
        return have_ended

    def check(self) -> None:
        """Raises the error of a background exchange, if there is one."""
        for pending_exchange in self._pending_exchanges:
            if pending_exchange.background is not None:
                pending_exchange.background.check()

    def run_collective(self, act: Callable[[CollectiveWaiter], T], label: str = "") -> T:
        """Returns the result of the collective `act`; reports an error on this rank to the others before raising it."""
        with self._reporting():
            self._take_finite_check()()
            return self._run(act, label or self._next_label())

    def _run(self, act: Callable[[CollectiveWaiter], T], label: str) -> T:
        if self._stream is not None:
            self._anchors.used_on(torch.cuda.current_stream(self._device), range(self._settings.fragments))
        with torch.no_grad():
            result = act(self._waiter(label))
        self._monitor.record_passed(label)
        return result

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Reports an error on this rank to the others before it is raised."""
        try:
            yield
        except Exception as problem:
            error = told(problem)
            self._monitor.report(error)
            if error is problem:
                raise
            raise error from problem

    def progress(self) -> ExchangeProgress:
        """Returns the sample counts and costs of this rank for a checkpoint."""
        self.take_loaded()  # samples before a load do not count
        self.period_chooser.pace.drop()  # a checkpoint interrupts the step
        return {
            "samples": list(self._samples),
            "counts": list(self._counts),
            "seen": list(self.period_chooser.costs.row[1:]),
            "differs": self._may_differ,
        }

    def state(self) -> ExchangeState:
        """Waits for the pending exchanges without merging them; returns all tensors of a checkpoint inside a period."""
        self.take_loaded()
        with self._reporting():
            self._drain()
        return {
            "settings": self._bound_settings(),
            "policies": dict(self.buffers.policies),
            "averaged": self._payload_builder.averaged_names,
            "sent": self._payload_builder.laid_out,
            "counts": self._groups.is_alone or self._replica_exchange.counts_samples,
            "restarts": self._restarts,
            "points": self._anchors.state(),
            "trips": [pending_exchange.saved() for pending_exchange in self._pending_exchanges],
        }

    def resume(
        self,
        progress: ExchangeProgress,
        state: ExchangeState | None,
        agreed: Tensors | None,
        trained: Collection[str] | None = None,
    ) -> None:
        """Restores a checkpoint; without a `state` anchors start from the module's values.

        `trained` are the parameters that its run trained; those that are trained now if left out.
        """
        count = self._settings.fragments
        samples, counts = list(progress["samples"]), list(progress["counts"])
        self._samples = samples if len(samples) == count else [max(samples)] * count
        self._counts = counts if len(counts) == count else [max(counts)] * count
        self.period_chooser.costs = ExchangeCosts(0.0, *progress["seen"])
        self._may_differ = progress.get("differs", False)
        self.buffers.learn(agreed)
        self._loaded_weights.forget()
        settings = self._bound_settings()
        exchanged = None if state is None else state.get("sent")
        self._payload_builder.parameters.resume(trained, exchanged)
        self._lay_out_as_saved(exchanged)
        if state is None or state["settings"] != settings or not self._anchors.fit(state["points"]):
            if state is not None and (self._schedule.since or state["trips"]):
                changed = {name: value for name, value in state["settings"].items() if value != settings[name]}
                case = "with another cut of the network"
                if changed:
                    case = f"with other settings of the exchange, {changed}"
                raise CheckpointError(
                    f"the checkpoint was made between two exchanges, {case}. Go on with those to the next exchange."
                )
            self.reset_anchors(verified=False)
            return
        self._restarts = state["restarts"]
        self._anchors.resume(state["points"])
        self._pending_exchanges = [self._restored(saved) for saved in state["trips"]]

    def _lay_out_as_saved(self, names: Collection[str] | None) -> None:
        """Gives the anchors the slices that they had in a checkpoint; these are of the parameters `names`."""
        if names is None and self._payload_builder.has_layout:
            return
        self._payload_builder.lay_out(names)
        if self._anchors.are_kept:
            self._anchors.reset(self._payload_builder.snapshot(range(self._settings.fragments)).parts)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Puts the average over all nodes into the module; restores each node's state afterwards."""
        self.period_chooser.pace.drop()
        if self._groups.is_alone:
            yield
            return
        if self._membership.is_elastic:  # the others come to their next exchange
            self.finish()
            yield
            return
        with self._reporting():
            self._drain()
        entries, buffers = self._payload_builder.entries(), self.buffers.now()
        tensors = [*(entry.tensor for entry in entries), *buffers.values()]
        saved_values = [tensor.detach().clone() for tensor in tensors]
        agreed, may_differ = dict(self.buffers.agreed), self._may_differ
        try:
            with torch.no_grad(), self._reporting():
                loaded = self._loaded_weights.changed()
                self._may_differ |= bool(loaded)
                for pending_exchange in self._pending_exchanges:
                    if pending_exchange.outcome is not None:  # the changes since its snapshot are averaged below
                        self._payload_builder.apply(pending_exchange.payload, state=False, but=loaded)
                        merged = {
                            name: value
                            for name, value in pending_exchange.outcome.buffers.items()
                            if name not in loaded
                        }
                        self.buffers.put(merged, pending_exchange.snapshot, change=pending_exchange.payload.change)
                if self._schedule.since or self._pending_exchanges:
                    is_new = loaded >= {entry.home for entry in entries}  # without samples, as in finish()
                    self._average_now(parameters=True, samples=0.0 if is_new else self.samples)
                else:
                    self._average_rest()
            with self._loaded_weights.ignored():
                self._hidden = HiddenValues(tensors, saved_values, agreed, may_differ)
                yield
        finally:
            self._hidden = None
            self.buffers.agreed, self._may_differ = agreed, may_differ
            self._put(tensors, saved_values)

    @contextmanager
    def own_values(self) -> Iterator[None]:
        """Inside `averaged()`, puts this node's own values into the module for the block; nothing is sent."""
        hidden = self._hidden
        if hidden is None:
            yield
            return
        if self._loaded_weights.any:
            raise SpecError(
                "the own state of a node was asked for inside agreed(), but weights were loaded since the last step. "
                "Make a step first, or save outside of the block."
            )
        with torch.no_grad():
            averages = [tensor.detach().clone() for tensor in hidden.tensors]
            agreed, may_differ = self.buffers.agreed, self._may_differ
            self._put(hidden.tensors, hidden.values)
        self.buffers.agreed, self._may_differ, self._hidden = dict(hidden.agreed), hidden.may_differ, None
        try:
            yield
        finally:
            self.buffers.agreed, self._may_differ, self._hidden = agreed, may_differ, hidden
            self._put(hidden.tensors, averages)

    @staticmethod
    def _put(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)

    def _average_rest(self) -> None:
        """Averages what may differ although no step was made since the last exchange: buffers changed by a forward
        without a step, and parameters into which a change was merged, which leaves nodes different in the last bits.

        There are no samples since then, so all replicas have equal weight.
        """
        changed = self.buffers.changes(self.buffers.snapshot()).bits()
        vote = replace(self._make_vote("evaluation", samples=0.0), changed=changed)
        fingerprint = self._payload_builder.fingerprint()
        quorum = self.run_collective(partial(self._agreement.vote, vote, fingerprint, since=0, everywhere=True))
        if quorum.may_differ or any(quorum.changed):
            self._average_now(parameters=quorum.may_differ, samples=float(self._replica_exchange.counts_samples))

    def _average_now(self, *, parameters: bool, samples: float) -> None:
        """Puts the average over all nodes into the module, without codec or outer optimizer."""
        payload = self._payload_builder.snapshot_all() if parameters else self._payload_builder.snapshot(())
        snapshot = self.buffers.snapshot()
        description = self._payload_builder.describe(range(self._settings.fragments) if parameters else (), snapshot)
        vote = self._make_vote(f"an average\n{description}", samples=samples)
        fingerprint, since = self._payload_builder.fingerprint(), self._schedule.since
        agree = partial(
            self._agreement.reach, payload, vote, snapshot, fingerprint=fingerprint, since=since, exact=True
        )
        outcome = self.run_collective(agree)
        if outcome is None:  # no parameters differ
            return
        with torch.no_grad():
            self._payload_builder.apply(payload)
            self.buffers.put(outcome.buffers, snapshot, change=False)
        self._may_differ = False

    def take_loaded(self, *, everything: bool = False) -> None:
        """Takes the values loaded by `load_state_dict` since the last step as if nodes had agreed on them.

        Pending exchanges no longer change them. With `everything` the whole network counts as loaded.
        """
        if not self._loaded_weights.any and not everything:
            return
        with self._reporting():
            names, is_optimizer_loaded = self._loaded_weights.take()
            trained = {entry.home for entry in self._payload_builder.entries()}
            names |= {*trained, *self.buffers.policies} if everything else set()
            for pending_exchange in self._pending_exchanges:
                pending_exchange.loaded |= names
                pending_exchange.is_state_loaded |= is_optimizer_loaded
            if names & trained:
                self._may_differ = True
                self._restart(names & trained, trained)

    def _follow_layout(self) -> None:
        """Gives the anchors the slices of the parameters that are exchanged now, if these have changed."""
        if self._payload_builder.has_layout:
            return
        if not self._averages or not self._anchors.are_kept:
            self._payload_builder.lay_out()
            return
        self._drain()  # pending exchanges still use the anchors
        act = partial(self._payload_builder.follow_layout, self._anchors, nodes=len(self._groups.nodes))
        self._run(act, self._next_label())

    def _restart(self, loaded: set[str], trained: set[str]) -> None:
        """Resets samples and anchors after weights were `loaded`."""
        if loaded == trained:
            self._forget_samples(range(self._settings.fragments))
        if not self._averages or not self._anchors.are_kept:
            return
        if loaded != trained:
            raise SpecError(
                f"load_state_dict has replaced {sorted(loaded)[0]!r}, but not {sorted(trained - loaded)[0]!r}, between "
                "two exchanges with an outer optimizer or a codec, which start from the last agreed weights. Load all "
                "weights that train at once, or load before synchronize."
            )
        self._drain()  # pending exchanges still use the anchors
        self._payload_builder.lay_out()
        self._anchors.reset(self._payload_builder.snapshot(range(self._settings.fragments)).parts, verified=False)
        self._restarts += 1

    def _bound_settings(self) -> dict[str, object]:
        fields = self._settings.model_dump(mode="json")
        return {name: fields[name] for name in SETTINGS}

    def _prepare(self, fragments: tuple[int, ...], *, overlap: int) -> tuple[PendingExchange, Vote, Fingerprint]:
        for fragment in fragments:
            self._counts[fragment] += 1
        stateful = tuple(f for f in fragments if self._counts[f] % self._settings.state_every == 0)
        payload = self._payload_builder.snapshot(fragments, stateful=stateful, change=overlap > 0)
        snapshot = self.buffers.snapshot() if self._settings.fragments - 1 in fragments else {}
        description = self._description(fragments, snapshot, stateful=stateful)
        samples = max(self._samples[fragment] for fragment in fragments)
        vote = self._make_vote(description, samples=samples)
        needs_fingerprint = self._agreement.compares_replicas
        fingerprint = self._payload_builder.fingerprint(fragments) if needs_fingerprint else NO_TENSORS
        step, number = self._schedule.step, self._schedule.exchanges + 1
        steps, label = self._schedule.since_of(fragments), self._next_label()
        pending_exchange = PendingExchange(
            number, step, step + overlap, fragments, stateful, steps, label, payload, snapshot, samples=samples
        )
        return pending_exchange, vote, fingerprint

    def _description(self, fragments: Sequence[int], snapshot: Tensors, *, stateful: Sequence[int] = ()) -> str:
        tensors = self._payload_builder.describe(fragments, snapshot, stateful=stateful)
        restarts = 0 if self._membership.is_elastic else self._restarts  # a node that joins takes over the anchors
        return f"{restarts} restarts\n{tensors}"

    def _make_vote(self, description: str, *, samples: float) -> Vote:
        description = f"{self._payload_builder.parameters.description()}\n{description}"
        payload_hash = int.from_bytes(hashlib.sha256(description.encode()).digest()[:6])  # exact in a float64
        at = self._schedule
        return Vote(
            step=at.step,
            exchange=at.exchanges,
            samples=samples,
            payload_hash=payload_hash,
            backwards=self._monitor.backwards,
            measured=self.period_chooser.measured,
            may_have_skipped_step=self.may_have_skipped_step,
            may_differ=self._may_differ or at.since > 0,
            learning_rate=learning_rate(self._optimizer),  # now: a scheduler may change it while the exchange runs
        )

    def _merge(self, pending_exchange: PendingExchange) -> None:
        began = time.monotonic()
        self._await(pending_exchange)
        pending_exchange.background = None  # frees its memory now instead of at garbage collection
        self._pending_exchanges.remove(pending_exchange)
        self._apply(pending_exchange, time.monotonic() - began)

    def _apply(self, pending_exchange: PendingExchange, waited_s: float) -> None:
        outcome = pending_exchange.outcome
        if outcome is None:
            if self._membership.is_elastic:
                self._postpone(pending_exchange)
            return
        self._take_over(pending_exchange.payload, outcome.buffers, pending_exchange.snapshot)
        self._may_differ = pending_exchange.payload.change
        if self._stream is not None:
            for buffer in outcome.buffers.values():  # allocated on the other stream, read on this one
                buffer.record_stream(torch.cuda.current_stream(self._device))
        if not pending_exchange.is_state_loaded:
            self._payload_builder.reset_state(pending_exchange.payload, pending_exchange.stateful)
        self.period_chooser.update(
            begun=pending_exchange.snapshot_step,
            steps=pending_exchange.steps,
            seconds=outcome.seconds,
            drift=outcome.carried.drift,
            largest_costs=outcome.measured,
        )
        for callback in self.on_exchange:
            callback(pending_exchange.summary(outcome, self._schedule.step, waited_s))

    def _postpone(self, pending_exchange: PendingExchange) -> None:
        """Lets the samples and steps of an exchange that was not made count for the next one."""
        self._schedule.record_postponed(pending_exchange.fragments, pending_exchange.steps)
        for fragment in pending_exchange.fragments:
            self._samples[fragment] += pending_exchange.samples

    def _drain(self) -> None:
        """Waits until all pending exchanges have completed; they are merged later."""
        for pending_exchange in self._pending_exchanges:
            self._await(pending_exchange)

    def _await(self, pending_exchange: PendingExchange) -> None:
        if pending_exchange.background is not None:
            pending_exchange.outcome = pending_exchange.background.wait(self._waiter(pending_exchange.label))
            self._monitor.record_passed(pending_exchange.label)
        for name, agreed in pending_exchange.drop_loaded().items():
            self.buffers.agreed[name] = agreed.clone()

    def _waiter(self, label: str, *, reports: bool = True) -> CollectiveWaiter:
        at, limit_s = self._schedule.step, self._settings.timeout_s
        return CollectiveWaiter(self._monitor, label=label, step=at, timeout_s=limit_s, reports=reports)

    def _next_label(self) -> str:
        self._collectives += 1
        return f"exchange {self._schedule.exchanges + 1} (collective {self._collectives})"

    def _forget_samples(self, fragments: Sequence[int]) -> None:
        self.may_have_skipped_step = False
        for fragment in fragments:
            self._samples[fragment] = 0.0

    def _restored(self, saved: PendingState) -> PendingExchange:
        payload = self._payload_builder.restored(saved["pieces"], saved["fragments"])
        return restored(saved, payload, self._next_label(), self._device)
