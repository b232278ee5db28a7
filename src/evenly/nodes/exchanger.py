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

from evenly._errors import CheckpointError
from evenly.comm import Alarm, Groups, Waiter
from evenly.nodes.adapting import Pace, Seen, choose
from evenly.nodes.averager import Averager
from evenly.nodes.buffers import Buffers
from evenly.nodes.cargo import Cargo
from evenly.nodes.contents import Contents
from evenly.nodes.divergence import DivergenceCheck, learning_rate
from evenly.nodes.fingerprint import Fingerprint
from evenly.nodes.flight import Flight
from evenly.nodes.loads import Loads
from evenly.nodes.membership import Ballot, Membership, Quorum
from evenly.nodes.points import Points, of_node
from evenly.nodes.schedule import Schedule
from evenly.nodes.sharing import Sharing
from evenly.nodes.trips import Arrived, Exchanged, Tensors, Trip, restored
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
        sharing: Sharing,
        settings: Exchange,
        alarm: Alarm,
        joint: bool,
        before: Callable[[], Look],
    ) -> None:
        self.on_exchange: list[Callable[[Exchanged], None]] = []
        self.on_period: list[Callable[[int, int, str], None]] = []  # called with step, steps of the next period, why
        self.doubtful = False
        self.buffers = Buffers(module, settings, sharing, alone=groups.party.size == 1)
        self._module, self._optimizer, self._schedule = module, optimizer, schedule
        self._groups, self._membership, self._sharing = groups, membership, sharing
        self._settings, self._alarm, self._before = settings, alarm, before
        self._averages = len(groups.nodes) > 1 and not joint  # parameters, which else never differ
        self._samples = [0.0] * settings.fragments  # of this rank since the last snapshot of each fragment
        self._counts = [0] * settings.fragments  # snapshots of each fragment
        self._meetings = 0  # with other nodes, of any kind
        self._trips: list[Trip] = []  # under way
        self._points = Points(settings)
        self._pace = Pace()
        self._seen = Seen()  # by this rank, of its last exchange
        self._contents = Contents(module, optimizer, sharing, settings, travels=self._averages)
        self._divergence = DivergenceCheck(optimizer, groups, sharing, joint=joint)
        self._loads, self._restarts = Loads(module, optimizer), 0  # how often points began anew from loaded weights
        self._is_assembled = True  # all ranks have come where the last exchange was made
        self._differs = False  # what was merged as a change left nodes different in the last bits
        self._device = next(module.parameters(), torch.empty(0)).device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch has no annotation here

    def begin(self, *, verified: bool = True) -> None:
        """Remembers the values with which all nodes start or go on; if not `verified`, the next exchange compares."""
        self._contents.forget()
        self._loads.forget()
        if self._points.are_kept:
            self._points.begin(self._contents.load(range(self._settings.fragments)).parts, verified=verified)

    @property
    def samples(self) -> float:
        """The samples of this rank since the oldest of the last snapshots."""
        return max(self._samples)

    def count(self, samples: float) -> None:
        """Adds the samples of a step."""
        self._samples = [before + samples for before in self._samples]

    def after_step(self, due: Sequence[int]) -> None:
        """Merges what is to be merged after the step just made, then exchanges the fragments that are due."""
        self._pace.end()
        with self._ringing():
            for trip in [trip for trip in self._trips if trip.due <= self._schedule.step]:
                self._merge(trip)
            if due:
                self.exchange(due, waits=self._schedule.warms_up)
        self._pace.begin(beside=bool(self._trips))

    def exchange(self, fragments: Sequence[int], *, waits: bool = False, exact: bool = False) -> None:
        """Exchanges `fragments`: takes their snapshot, and merges now or after the steps that overlap with it.

        Several fragments are weighted by the samples since the oldest of their snapshots.
        """
        self.take_loaded()
        if self._groups.party.size == 1:
            self._schedule.exchanged(fragments)
            self._forget_samples(fragments)
            self.buffers.learn()
            return
        with self._ringing():
            for trip in [trip for trip in self._trips if waits or set(trip.fragments) & set(fragments)]:
                self._merge(trip)
            overlap = 0 if waits else self._settings.overlap
            look = self._before()
            trip, ballot, held = self._depart(tuple(fragments), overlap=overlap)
            self._schedule.exchanged(fragments)
            self._forget_samples(fragments)
            ballot = replace(ballot, ends=exact)
            agree = partial(self._agree, trip.cargo, ballot, trip.snapshot, held=held, since=trip.steps, look=look)
            if overlap == 0:
                if self._stream is not None:
                    torch.cuda.current_stream(self._device).synchronize()
                began = time.monotonic()
                trip.arrived = self._met(partial(agree, exact=exact), trip.place)
                self._unload(trip, time.monotonic() - began)
            else:
                self._fly(trip, agree)

    def _fly(self, trip: Trip, agree: "Callable[[Waiter], Arrived | None]") -> None:
        if self._stream is not None:
            self._points.used_on(self._stream, trip.fragments)
        after = self._trips[-1].flight if self._trips else None
        act = partial(agree, self._waiter(trip.place, tells=False))
        trip.flight = Flight(act, alarm=self._alarm, stream=self._stream, after=after)
        self._trips.append(trip)

    @property
    def remembers(self) -> bool:
        """Whether more than the network itself is known of the last exchanges."""
        return bool(self._trips) or (self._averages and self._points.are_kept)

    def finish(self) -> None:
        """Lets all ranks go on with the same model."""
        self.take_loaded()
        with self._ringing():
            self.land()
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

    def land(self) -> None:
        """Merges all that is under way, at once."""
        for trip in list(self._trips):
            self._merge(trip)

    def close(self) -> bool:
        """Lets what is under way end by itself; returns whether it has."""
        self._loads.close()
        flights = [trip.flight for trip in self._trips if trip.flight is not None]
        landed = not flights or flights[-1].ends_within(CLOSING_S)  # the others are before it
        steps, trips = self._schedule.since if self._averages else 0, len(self._trips)
        if (steps or trips) and not self._alarm.has_rung:
            case = f"{trips} exchanges under way are dropped" if trips else f"{steps} steps came after an exchange"
            logger.warning("%s, so nodes hold different parameters: call finish() before close()", case)
        return landed

    def check(self) -> None:
        """Raises what went wrong in an exchange under way."""
        for trip in self._trips:
            if trip.flight is not None:
                trip.flight.check()

    def meet(self, act: "Callable[[Waiter], Any]", place: str = "") -> Any:
        """Returns act's result; an error on this rank is told to the others before it is raised."""
        with self._ringing():
            self._before()()
            return self._met(act, place or self._next_place())

    def _met(self, act: "Callable[[Waiter], Any]", place: str) -> Any:
        if self._stream is not None:
            self._points.used_on(torch.cuda.current_stream(self._device), range(self._settings.fragments))
        with torch.no_grad():
            result = act(self._waiter(place))
        self._alarm.passed(place)
        return result

    @contextmanager
    def _ringing(self) -> Iterator[None]:
        """Tells an error on this rank to the others before it is raised."""
        try:
            yield
        except Exception as error:
            self._alarm.ring(error)
            raise

    def progress(self) -> dict[str, Any]:
        """Returns where this rank stands between exchanges."""
        self.take_loaded()  # samples before a load no longer count
        self._pace.drop()  # a checkpoint is made
        counted = {"samples": list(self._samples), "counts": list(self._counts)}
        return {**counted, "seen": list(self._seen.row[1:]), "differs": self._differs}

    def state(self) -> dict[str, Any]:
        """Returns all tensors that a checkpoint needs to go on inside a period, with what is under way."""
        self.take_loaded()
        with self._ringing():
            self._drain()
        trips = [trip.saved() for trip in self._trips]
        return {
            "settings": self._bound_settings(),
            "policies": dict(self.buffers.policies),
            "restarts": self._restarts,
            "points": self._points.state(),
            "trips": trips,
        }

    def resume(self, progress: dict[str, Any], state: dict[str, Any] | None, agreed: Tensors | None) -> None:
        """Goes on from a checkpoint; without one of its own from what is in the module now."""
        count = self._settings.fragments
        samples, counts = list(progress["samples"]), list(progress["counts"])
        self._samples = samples if len(samples) == count else [max(samples)] * count
        self._counts = counts if len(counts) == count else [max(counts)] * count
        self._seen = Seen(0.0, *progress["seen"])
        self._differs = progress.get("differs", False)
        self.buffers.learn(agreed)
        self._loads.forget()
        settings = self._bound_settings()
        if state is None or state["settings"] != settings or not self._points.fit(state["points"]):
            if state is not None and (self._schedule.since or state["trips"]):
                was = {name: value for name, value in state["settings"].items() if value != settings[name]}
                case = f"with other settings of the exchange, {was}" if was else "with another cut of the network"
                raise CheckpointError(
                    f"the checkpoint was made between two exchanges, {case}. Go on with those to the next exchange."
                )
            self.begin(verified=False)
            return
        self._restarts = state["restarts"]
        self._points.resume(state["points"])
        self._trips = [self._restored(saved) for saved in state["trips"]]

    def _bound_settings(self) -> dict[str, Any]:
        fields = self._settings.model_dump(mode="json")
        return {name: fields[name] for name in SETTINGS}

    def _depart(self, fragments: tuple[int, ...], *, overlap: int) -> tuple[Trip, Ballot, Fingerprint]:
        for fragment in fragments:
            self._counts[fragment] += 1
        stateful = tuple(f for f in fragments if self._counts[f] % self._settings.state_every == 0)
        cargo = self._contents.load(fragments, stateful=stateful, change=overlap > 0)
        snapshot = self.buffers.snapshot() if self._settings.fragments - 1 in fragments else {}
        layout = f"{self._restarts} restarts\n{self._contents.words(fragments, snapshot, stateful=stateful)}"
        samples = max(self._samples[fragment] for fragment in fragments)
        ballot = self._ballot(layout, samples=samples)
        held = self._contents.fingerprint(fragments)
        step, number = self._schedule.step, self._schedule.exchanges + 1
        steps, place = self._schedule.since_of(fragments), self._next_place()
        trip = Trip(number, step, step + overlap, fragments, stateful, steps, place, cargo, snapshot)
        return trip, ballot, held

    def _ballot(self, layout: str, *, samples: float) -> Ballot:
        code = int.from_bytes(hashlib.sha256(layout.encode()).digest()[:6])  # exact in a float64
        at, seen = self._schedule, replace(self._seen, step_s=self._pace.median_s)
        return Ballot(
            step=at.step,
            exchange=at.exchanges,
            samples=samples,
            layout=code,
            backwards=self._alarm.begun,
            measured=seen.row,
            doubtful=self.doubtful,
            differs=self._differs or at.since > 0,
        )

    def _agree(
        self,
        cargo: Cargo,
        ballot: Ballot,
        snapshot: Tensors,
        waiter: Waiter,
        *,
        held: Fingerprint,
        since: int,
        exact: bool = False,
        look: Look | None = None,
    ) -> Arrived | None:
        """Returns what all ranks have agreed on; nothing where they only came together, and had nothing to tell."""
        if look is not None:
            look()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()  # steps queued before are no part of the exchange
        began = time.monotonic()
        moves = self.buffers.moves(snapshot)
        quorum = self._convene(replace(ballot, changed=moves.bits()), held, waiter, since=since)
        self._is_assembled = quorum.ends
        if quorum.ends and not quorum.differs and isinstance(self._schedule.period, EverySeconds):
            return None
        met = time.monotonic()  # from here on nobody waits for a slower rank
        counters, added = moves.split(quorum.changed)
        self._sharing.agree_on_largest(counters, waiter)
        exact = exact and quorum.ends
        carried = self._sharing.carry(cargo, added, quorum, waiter, points=self._points, exact=exact)
        if len(quorum.weights) > 1 and self._averages:
            carried = of_node(carried, self._groups.node_votes, waiter)
        agreed, seconds = moves.agreed(counters, added), time.monotonic() - met
        return Arrived(quorum.weights, carried, seconds, met - began, quorum.measured, agreed)

    def _convene(
        self, ballot: Ballot, held: Fingerprint, waiter: Waiter, *, since: int, everywhere: bool = False
    ) -> Quorum:
        """Returns who takes part, once it is sure that ranks which must hold the same parameters do."""
        rate = learning_rate(self._optimizer)
        ballot = replace(ballot, held=held.read(), holders=self._sharing.holders, learning_rate=rate)
        quorum = self._membership.convene(ballot, waiter)
        everywhere = everywhere and not quorum.differs
        if not self._averages or self._settings.overlap:
            since = ballot.step  # ranks of a node were never given the same bits since the start
        self._divergence.require_same(quorum, held, waiter, step=ballot.step, since=since, everywhere=everywhere)
        return quorum

    def _merge(self, trip: Trip) -> None:
        began = time.monotonic()
        self._await(trip)
        trip.flight = None  # what it holds is free now, not when a cycle is found
        self._trips.remove(trip)
        self._unload(trip, time.monotonic() - began)

    def _unload(self, trip: Trip, waited_s: float) -> None:
        arrived = trip.arrived
        if arrived is None:
            return
        with torch.no_grad():
            self._contents.unload(trip.cargo)
            self.buffers.put(arrived.buffers, trip.snapshot, change=trip.cargo.change)
        self._differs = trip.cargo.change
        if self._stream is not None:
            for buffer in arrived.buffers.values():  # of the other stream, and read on this one
                buffer.record_stream(torch.cuda.current_stream(self._device))
        if not trip.is_state_loaded:
            self._contents.reset_state(trip.stateful)
        self._adapt(trip, arrived)
        for tell in self.on_exchange:
            tell(trip.told(arrived, self._schedule.step, waited_s))

    def _adapt(self, trip: Trip, arrived: Arrived) -> None:
        """Chooses the length of the next period; all ranks know the same, so they choose the same."""
        period, at = self._schedule.period, self._schedule
        if not isinstance(period, Adaptive) or not self._averages or trip.begun <= period.warmup:
            return
        transfer_s, slowed_s = self._pace.merged(arrived.seconds, slowed_s=self._seen.slowed_s)
        self._seen = Seen(0.0, transfer_s, arrived.carried.drift, trip.steps, slowed_s)
        steps, why = choose(period, self._settings, at.next_length, Seen(*arrived.measured))
        if steps != at.next_length:
            at.next_length = steps
            logger.info("after step %d: the next periods have %d steps: %s", at.step, steps, why)
            for tell in self.on_period:
                tell(at.step, steps, why)

    def _drain(self) -> None:
        """Waits until all that is under way has arrived; it is merged later."""
        for trip in self._trips:
            self._await(trip)

    def _await(self, trip: Trip) -> None:
        if trip.flight is not None:
            trip.arrived = trip.flight.wait(self._waiter(trip.place))
            self._alarm.passed(trip.place)
        for name, agreed in trip.drop_loaded().items():
            self.buffers.agreed[name] = agreed.clone()

    def _waiter(self, place: str, *, tells: bool = True) -> Waiter:
        at, limit_s = self._schedule.step, self._settings.timeout_s
        return Waiter(self._alarm, place=place, step=at, timeout_s=limit_s, tells=tells)

    def _next_place(self) -> str:
        self._meetings += 1
        return f"exchange {self._schedule.exchanges + 1} (meeting {self._meetings})"

    def _forget_samples(self, fragments: Sequence[int]) -> None:
        self.doubtful = False
        for fragment in fragments:
            self._samples[fragment] = 0.0

    def _restored(self, saved: dict[str, Any]) -> Trip:
        cargo = self._contents.load(saved["fragments"], stateful=saved["stateful"], change=True)
        return restored(saved, cargo, self._next_place(), self._device)
