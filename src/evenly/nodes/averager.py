"""The average over all nodes besides the exchanges of the schedule, and what load_state_dict has put in their way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from evenly._errors import SpecError
from evenly.comm import Groups, Waiter
from evenly.nodes.adapting import Pace
from evenly.nodes.buffers import Buffers
from evenly.nodes.cargo import Cargo
from evenly.nodes.contents import Contents
from evenly.nodes.fingerprint import Fingerprint
from evenly.nodes.loads import Loads
from evenly.nodes.membership import Ballot, Quorum
from evenly.nodes.points import Points
from evenly.nodes.schedule import Schedule
from evenly.nodes.sharing import Sharing
from evenly.nodes.state import trained_entries
from evenly.nodes.trips import Arrived, Tensors, Trip
from evenly.spec import Exchange


class Averager(ABC):
    """The part of an `Exchanger` that averages and starts anew between the exchanges of its schedule."""

    buffers: Buffers
    _module: torch.nn.Module
    _schedule: Schedule
    _groups: Groups
    _sharing: Sharing
    _settings: Exchange
    _contents: Contents
    _points: Points
    _pace: Pace
    _loads: Loads
    _trips: list[Trip]  # under way
    _averages: bool  # parameters, which else never differ
    _differs: bool  # nodes may have different parameters though no step was made
    _restarts: int  # how often points began anew from loaded weights

    @property
    @abstractmethod
    def samples(self) -> float:
        """The samples of this rank since the oldest of the last snapshots."""

    @abstractmethod
    def meet(self, act: "Callable[[Waiter], Any]", place: str = "") -> Any:
        """Returns act's result; an error on this rank is told to the others before it is raised."""

    @abstractmethod
    def _ringing(self) -> AbstractContextManager[None]:
        """Tells an error on this rank to the others before it is raised."""

    @abstractmethod
    def _ballot(self, layout: str, *, samples: float) -> Ballot:
        """Returns what this rank brings to an exchange of what `layout` describes."""

    @abstractmethod
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
    ) -> Arrived | None:
        """Returns what all ranks have agreed on."""

    @abstractmethod
    def _convene(
        self, ballot: Ballot, held: Fingerprint, waiter: Waiter, *, since: int, everywhere: bool = False
    ) -> Quorum:
        """Returns who takes part, once it is sure that ranks which must hold the same parameters do."""

    @abstractmethod
    def _drain(self) -> None:
        """Waits until all that is under way has arrived; it is merged later."""

    @abstractmethod
    def _forget_samples(self, fragments: Sequence[int]) -> None:
        """Counts samples of these fragments anew."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Puts the average over all nodes into the module, then gives each node its own state back."""
        self._pace.drop()
        if self._groups.party.size == 1:
            yield
            return
        with self._ringing():
            self._drain()
        entries, buffers = trained_entries(self._module), self.buffers.now()
        own = [*(entry.tensor for entry in entries), *buffers.values()]
        kept, agreed, differs = [tensor.detach().clone() for tensor in own], dict(self.buffers.agreed), self._differs
        try:
            with torch.no_grad(), self._ringing():
                loaded = self._loads.changed()
                self._differs |= bool(loaded)
                for trip in self._trips:
                    if trip.arrived is not None:  # what is since its snapshot is what has to be averaged
                        self._contents.unload(trip.cargo, state=False, but=loaded)
                        merged = {name: value for name, value in trip.arrived.buffers.items() if name not in loaded}
                        self.buffers.put(merged, trip.snapshot, change=trip.cargo.change)
                if self._schedule.since or self._trips:
                    is_new = loaded >= {entry.home for entry in entries}  # no samples are behind it, as in finish()
                    self._average_now(parameters=True, samples=0.0 if is_new else self.samples)
                else:
                    self._average_rest()
            with self._loads.aside():
                yield
        finally:
            self.buffers.agreed, self._differs = agreed, differs
            with torch.no_grad():
                for tensor, value in zip(own, kept, strict=True):
                    tensor.copy_(value)

    def _average_rest(self) -> None:
        """Averages what may differ though no step was made since the last exchange: buffers that a forward without a
        step has changed, and parameters whose changes were merged, which leaves nodes different in the last bits.

        No samples are behind it, so that all networks count alike.
        """
        changed = self.buffers.moves(self.buffers.snapshot()).bits()
        ballot = replace(self._ballot("a look", samples=0.0), changed=changed)
        held = self._contents.fingerprint()
        quorum = self.meet(partial(self._convene, ballot, held, since=0, everywhere=True))
        if quorum.differs or any(quorum.changed):
            self._average_now(parameters=quorum.differs, samples=float(self._sharing.answers))

    def _average_now(self, *, parameters: bool, samples: float) -> None:
        """Puts the average over all nodes into the module, without codes or an outer optimizer."""
        cargo = self._contents.load_all() if parameters else self._contents.load(())
        snapshot = self.buffers.snapshot()
        words = self._contents.words(range(self._settings.fragments) if parameters else (), snapshot)
        ballot = self._ballot(f"an average\n{words}", samples=samples)
        ways: Any = {"held": self._contents.fingerprint(), "since": self._schedule.since, "exact": True}
        arrived = self.meet(partial(self._agree, cargo, ballot, snapshot, **ways))
        with torch.no_grad():
            self._contents.unload(cargo)
            self.buffers.put(arrived.buffers, snapshot, change=False)
        self._differs = False

    def take_loaded(self, *, everything: bool = False) -> None:
        """Goes on from what `load_state_dict` has put in since the last step, as if nodes had agreed on it.

        Exchanges under way no longer change it. With `everything` all of the network counts as loaded.
        """
        if not self._loads.any and not everything:
            return
        with self._ringing():
            names, of_optimizer = self._loads.take()
            trained = {entry.home for entry in trained_entries(self._module)}
            names |= {*trained, *self.buffers.policies} if everything else set()
            for trip in self._trips:
                trip.loaded |= names
                trip.is_state_loaded |= of_optimizer
            if names & trained:
                self._differs = True
                self._restart(names & trained, trained)

    def _restart(self, loaded: set[str], trained: set[str]) -> None:
        """Forgets what led to the weights that were there before all of them were `loaded`."""
        if loaded == trained:
            self._forget_samples(range(self._settings.fragments))
        if not self._averages or not self._points.are_kept:
            return
        if loaded != trained:
            raise SpecError(
                f"load_state_dict has replaced {sorted(loaded)[0]!r}, but not {sorted(trained - loaded)[0]!r}, between "
                "two exchanges with an outer optimizer or a codec, which go on from the last agreed weights. Load all "
                "weights that train at once, or load before synchronize."
            )
        self._drain()  # what is under way still uses the points
        self._points.begin(self._contents.load(range(self._settings.fragments)).parts, verified=False)
        self._restarts += 1
