"""The exchanges of one network across nodes: begun after agreed steps, merged after agreed steps."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from evenly._errors import CheckpointError
from evenly.comm import Alarm, Groups, Waiter, all_gather
from evenly.nodes.adapting import Seen, choose
from evenly.nodes.cargo import Cargo
from evenly.nodes.flight import Flight
from evenly.nodes.fragments import Piece, split, within
from evenly.nodes.membership import Ballot, Membership, Quorum
from evenly.nodes.points import Carried, Points
from evenly.nodes.schedule import Schedule
from evenly.nodes.sharing import Sharing
from evenly.nodes.state import Entry, averages, difference, kept_buffers, reset_state, trained_entries
from evenly.nodes.trips import Arrived, Exchanged, Tensors, Trip, restored
from evenly.spec import Adaptive, Exchange

STEPS_KEPT = 32
CLOSING_S = 2.0  # for an exchange under way when nobody waits for it any more


class Exchanger:
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
        before: Callable[[], None],
    ) -> None:
        self.on_exchange: list[Callable[[Exchanged], None]] = []
        self.doubtful = False
        self.agreed = copies(kept_buffers(module))
        self._module, self._optimizer, self._schedule = module, optimizer, schedule
        self._groups, self._membership, self._sharing = groups, membership, sharing
        self._settings, self._alarm, self._before = settings, alarm, before
        self._averages = len(groups.nodes) > 1 and not joint  # parameters, which else never differ
        self._samples = [0.0] * settings.fragments  # of this rank since the last snapshot of each fragment
        self._counts = [0] * settings.fragments  # snapshots of each fragment
        self._meetings = 0  # with other nodes, of any kind
        self._trips: list[Trip] = []  # under way
        self._points = Points(settings)
        self._steps = _Steps()
        self._seen = Seen()  # by this rank, of its last exchange
        self.on_period: list[Callable[[int, str], None]] = []  # called with the steps of a new period, and why
        self._device = next(module.parameters(), torch.empty(0)).device

    def begin(self) -> None:
        """Remembers the values with which all nodes start."""
        if self._points.are_kept:
            self._points.begin(self._load(range(self._settings.fragments)).parts)

    @property
    def samples(self) -> float:
        """The samples of this rank since the oldest of the last snapshots."""
        return max(self._samples)

    def count(self, samples: float) -> None:
        """Adds the samples of a step."""
        self._samples = [before + samples for before in self._samples]

    def after_step(self, due: Sequence[int]) -> None:
        """Merges what is to be merged after the step just made, then exchanges the fragments that are due."""
        self._steps.end()
        for trip in [trip for trip in self._trips if trip.due <= self._schedule.step]:
            self._merge(trip)
        if due:
            self.exchange(due, waits=self._schedule.warms_up)
        self._steps.begin()

    def exchange(self, fragments: Sequence[int], *, waits: bool = False, exact: bool = False) -> None:
        """Exchanges `fragments`: takes their snapshot, and merges now or after the steps that overlap with it."""
        if self._groups.party.size == 1:
            self._schedule.exchanged(fragments)
            self._forget_samples(fragments)
            self.agreed = copies(kept_buffers(self._module))
            return
        for trip in [trip for trip in self._trips if waits or set(trip.fragments) & set(fragments)]:
            self._merge(trip)
        overlap = 0 if waits else self._settings.overlap
        trip, ballot = self._depart(tuple(fragments), overlap=overlap)

        def act(waiter: Waiter) -> Arrived:
            return self._agree(trip.cargo, ballot, trip.snapshot, waiter, exact=exact)

        self._schedule.exchanged(fragments)
        self._forget_samples(fragments)
        if overlap == 0:
            began = time.monotonic()
            trip.arrived = self.meet(act, trip.place)
            self._unload(trip, time.monotonic() - began)
        else:
            after = self._trips[-1].flight if self._trips else None
            waiter = self._waiter(trip.place, tells=False)
            trip.flight = Flight(partial(act, waiter), alarm=self._alarm, device=self._device, after=after)
            self._trips.append(trip)

    @property
    def remembers(self) -> bool:
        """Whether more than the network itself is known of the last exchanges."""
        return bool(self._trips) or (self._averages and self._points.are_kept)

    def finish(self) -> None:
        """Lets all ranks end with the same model."""
        has_landed = bool(self._trips)
        self.land()
        if self._schedule.since:
            self.exchange(range(self._settings.fragments), waits=True, exact=True)
        elif has_landed:
            self._average_now()  # what was merged as a change left nodes different in the last bits
        else:
            self.meet(lambda waiter: self._membership.convene(self._ballot("", samples=0.0), waiter))

    def land(self) -> None:
        """Merges all that is under way, at once."""
        for trip in list(self._trips):
            self._merge(trip)

    def close(self) -> bool:
        """Lets what is under way end by itself; returns whether it has."""
        flights = [trip.flight for trip in self._trips if trip.flight is not None]
        return not flights or flights[-1].ends_within(CLOSING_S)  # the others are before it

    def check(self) -> None:
        """Raises what went wrong in an exchange under way."""
        for trip in self._trips:
            if trip.flight is not None:
                trip.flight.check()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Puts the average over all nodes into the module, then gives each node its own state back."""
        if (not self._schedule.since and not self._trips) or self._groups.party.size == 1:
            yield
            return
        self._drain()
        entries, buffers = trained_entries(self._module), kept_buffers(self._module)
        own = [*(entry.tensor for entry in entries), *buffers.values()]
        kept = [tensor.detach().clone() for tensor in own]
        self._average_now()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(own, kept, strict=True):
                    tensor.copy_(value)

    def _average_now(self) -> None:
        """Puts the average over all nodes into the module, without codes or an outer optimizer."""
        entries, buffers = trained_entries(self._module), kept_buffers(self._module)
        cargo = self._sharing.load({"": entries} if self._averages else {})
        snapshot = self._snapshot()
        ballot = self._ballot(self._layout(entries, buffers), samples=self.samples)
        arrived = self.meet(lambda waiter: self._agree(cargo, ballot, snapshot, waiter, exact=True))
        with torch.no_grad():
            cargo.unload()
            for name, value in arrived.buffers.items():
                buffers[name].copy_(value)

    def meet(self, act: "Callable[[Waiter], Any]", place: str = "") -> Any:
        """Returns act's result; an error on this rank is told to the others before it is raised."""
        place = place or self._next_place()
        try:
            self._before()
            with torch.no_grad():
                result = act(self._waiter(place))
        except Exception as error:
            self._alarm.ring(error)
            raise
        self._alarm.passed(place)
        return result

    def progress(self) -> dict[str, Any]:
        """Returns where this rank stands between exchanges."""
        return {"samples": list(self._samples), "counts": list(self._counts)}

    def state(self) -> dict[str, Any]:
        """Returns all tensors that a checkpoint needs to go on inside a period, with what is under way."""
        self._drain()
        return {"points": self._points.state(), "trips": [trip.saved() for trip in self._trips]}

    def resume(self, progress: dict[str, Any], state: dict[str, Any] | None, agreed: Tensors | None) -> None:
        """Goes on from a checkpoint; without one of its own from what is in the module now."""
        self._samples, self._counts = list(progress["samples"]), list(progress["counts"])
        self.agreed = copies(kept_buffers(self._module) if agreed is None else agreed)
        if state is None or not self._points.fit(state["points"]):
            if state is not None and (self._schedule.since or state["trips"]):
                raise CheckpointError(
                    "the checkpoint was made between two exchanges, with other settings of the exchange (codec, "
                    "fragments, outer optimizer) or another cut of the network. Go on with those to the next exchange."
                )
            self.begin()
            return
        self._points.resume(state["points"])
        self._trips = [self._restored(saved) for saved in state["trips"]]

    def _depart(self, fragments: tuple[int, ...], *, overlap: int) -> tuple[Trip, Ballot]:
        for fragment in fragments:
            self._counts[fragment] += 1
        stateful = tuple(f for f in fragments if self._counts[f] % self._settings.state_every == 0)
        cargo = self._load(fragments, stateful=stateful, change=overlap > 0)
        snapshot = self._snapshot() if self._settings.fragments - 1 in fragments else {}
        entries = [entry for chosen in self._entries(fragments).values() for entry in chosen]
        layout = self._layout([*entries, *self._state(stateful)], snapshot)
        samples = max(self._samples[fragment] for fragment in fragments)
        ballot = self._ballot(layout, samples=samples)
        step, number = self._schedule.step, self._schedule.exchanges + 1
        due, place = step + overlap, self._next_place()
        return Trip(number, step, due, fragments, stateful, place, cargo, snapshot), ballot

    def _entries(self, fragments: Sequence[int]) -> dict[str, list[Entry]]:
        """Returns the parameters of each fragment, under the key of its points."""
        if not self._averages:
            return {}
        entries, pieces = trained_entries(self._module), self._pieces()
        return {f"{fragment}": within(entries, pieces[fragment]) for fragment in fragments}

    def _state(self, fragments: Sequence[int]) -> list[Entry]:
        """Returns the optimizer's state that travels with these fragments."""
        if not fragments or not self._averages or not self._settings.treats_state("average"):
            return []
        slots = self._sharing.state(self._module, self._optimizer)
        slots = [entry for entry in slots if self._settings.policy_of(entry.slot) == "average"]
        return [entry for fragment in fragments for entry in within(slots, self._pieces()[fragment])]

    def _pieces(self) -> list[Piece]:
        entries = trained_entries(self._module)
        sizes = self._sharing.sizes([(entry.home, entry.tensor) for entry in entries])
        return split(entries, sizes, self._settings.fragments, rows=self._sharing.splits_rows)

    def _load(self, fragments: Sequence[int], *, stateful: Sequence[int] = (), change: bool = False) -> Cargo:
        return self._sharing.load(self._entries(fragments), self._state(stateful), change=change)

    def _layout(self, entries: Sequence[Entry], buffers: Tensors) -> str:
        """Returns what is about to be sent, in words."""
        named = [*((entry.home, entry.tensor) for entry in entries), *buffers.items()]
        labels = [*(entry.label for entry in entries), *buffers]
        return "\n".join(f"{label} {size}" for label, size in zip(labels, self._sharing.sizes(named), strict=True))

    def _ballot(self, layout: str, *, samples: float) -> Ballot:
        code = int.from_bytes(hashlib.sha256(layout.encode()).digest()[:6])  # exact in a float64
        at = self._schedule
        seen = (self._steps.median_s, self._seen.transfer_s, self._seen.drift)
        return Ballot(at.step, at.exchanges, samples, code, self._alarm.begun, seen, self.doubtful)

    def _snapshot(self) -> Tensors:
        """Returns the buffers as they are; those known not to have changed since the last exchange are not copied.

        To compare them on a GPU would stall it, so all are copied there.
        """
        found = {}
        for name, buffer in kept_buffers(self._module).items():
            is_same = not buffer.is_cuda and torch.equal(buffer, self.agreed[name])
            found[name] = self.agreed[name] if is_same else buffer.detach().clone()
        return found

    def _agree(self, cargo: Cargo, ballot: Ballot, snapshot: Tensors, waiter: Waiter, *, exact: bool) -> Arrived:
        before = {name: self.agreed[name] for name in snapshot}
        moved = tuple(b is not before[name] and not torch.equal(b, before[name]) for name, b in snapshot.items())
        quorum = self._membership.convene(replace(ballot, changed=moved), waiter)
        began = time.monotonic()  # from here on nobody waits for a slower rank
        changed = {name: snapshot[name] for name, bit in zip(snapshot, quorum.changed, strict=True) if bit}
        counters = {name: buffer.clone() for name, buffer in changed.items() if not averages(buffer)}
        moves = {name: difference(b, before[name]) for name, b in changed.items() if averages(b)}
        self._sharing.agree_on_largest(counters, quorum, waiter)
        carried = cargo.carry(self._points, moves, quorum, waiter, exact=exact)
        carried = self._whole_drift(carried, quorum, waiter)
        buffers = {n: counters[n] if n in counters else before[n] + moves[n] for n in changed}
        return Arrived(quorum.weights, carried, time.monotonic() - began, quorum.measured, buffers)

    def _whole_drift(self, carried: Carried, quorum: Quorum, waiter: Waiter) -> Carried:
        """Returns what was carried with the drift of the whole node, of which this rank knows some slices."""
        if len(quorum.weights) == 1 or not self._averages:
            return carried
        row = torch.tensor([carried.distance, carried.length], dtype=torch.float64)
        rows, work = all_gather(row, self._groups.node_votes)
        waiter.wait([work])
        distance, length = rows.sum(0).tolist()
        return Carried(carried.sent_bytes, distance, length)

    def _merge(self, trip: Trip) -> None:
        began = time.monotonic()
        if trip.flight is not None:
            trip.arrived = trip.flight.wait(self._waiter(trip.place))
            trip.flight = None  # what it holds is free now, not when a cycle is found
            self._alarm.passed(trip.place)
        self._trips.remove(trip)
        self._unload(trip, time.monotonic() - began)

    def _unload(self, trip: Trip, waited_s: float) -> None:
        arrived = trip.arrived
        if arrived is None:
            return
        with torch.no_grad():
            trip.cargo.unload()
            self._put_buffers(trip, arrived.buffers)
        self._reset_state(trip)
        self._seen = Seen(0.0, arrived.seconds, arrived.carried.drift)
        self._adapt(Seen(*arrived.measured))
        for tell in self.on_exchange:
            tell(trip.told(arrived, self._schedule.step, waited_s))

    def _adapt(self, seen: Seen) -> None:
        """Chooses the length of the next period; all ranks know the same, so they choose the same."""
        period, at = self._schedule.period, self._schedule
        if not isinstance(period, Adaptive) or not self._averages or at.warms_up:
            return
        steps, why = choose(period, self._settings, at.next_length, seen)
        if steps != at.next_length:
            at.next_length = steps
            for tell in self.on_period:
                tell(steps, why)

    def _put_buffers(self, trip: Trip, agreed: Tensors) -> None:
        for name, buffer in kept_buffers(self._module).items():
            if name not in agreed:
                continue
            if not trip.cargo.change:
                buffer.copy_(agreed[name])
            elif buffer.dtype == torch.bool:
                buffer.logical_or_(agreed[name])
            else:
                buffer.add_(agreed[name] - trip.snapshot[name])
            self.agreed[name] = agreed[name].detach().clone()

    def _reset_state(self, trip: Trip) -> None:
        if trip.stateful and self._settings.treats_state("reset"):
            homes = {home for fragment in trip.stateful for home in self._pieces()[fragment]}
            reset_state(self._module, self._optimizer, homes, lambda slot: self._settings.policy_of(slot) == "reset")

    def _drain(self) -> None:
        """Waits until all that is under way has arrived; it is merged later."""
        for trip in self._trips:
            if trip.flight is not None:
                trip.arrived = trip.flight.wait(self._waiter(trip.place))
                self._alarm.passed(trip.place)

    def _waiter(self, place: str, *, tells: bool = True) -> Waiter:
        return Waiter(
            self._alarm, place=place, step=self._schedule.step, timeout_s=self._settings.timeout_s, tells=tells
        )

    def _next_place(self) -> str:
        self._meetings += 1
        return f"exchange {self._schedule.exchanges + 1} (meeting {self._meetings})"

    def _forget_samples(self, fragments: Sequence[int]) -> None:
        self.doubtful = False
        for fragment in fragments:
            self._samples[fragment] = 0.0

    def _restored(self, saved: dict[str, Any]) -> Trip:
        cargo = self._load(saved["fragments"], stateful=saved["stateful"], change=True)
        return restored(saved, cargo, self._next_place(), self._device)


class _Steps:
    """How long steps take, without exchanges."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._began: float | None = None

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        if self._began is not None:
            self._seconds = [*self._seconds, time.monotonic() - self._began][-STEPS_KEPT:]

    @property
    def median_s(self) -> float:
        return median(self._seconds) if self._seconds else 0.0


def copies(buffers: Tensors) -> Tensors:
    """Returns copies of the buffers."""
    return {name: buffer.detach().clone() for name, buffer in buffers.items()}
