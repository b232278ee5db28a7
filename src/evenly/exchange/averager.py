"""The average over all nodes besides the exchanges of the schedule, and what load_state_dict has put in their way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from evenly.comm import CollectiveWaiter, Groups
from evenly.errors import SpecError
from evenly.exchange.anchors import Anchors
from evenly.exchange.buffers import Buffers
from evenly.exchange.contents import PayloadBuilder
from evenly.exchange.loaded_weights import LoadedWeights
from evenly.exchange.membership import Quorum, Vote
from evenly.exchange.payload import Payload
from evenly.exchange.pending import ExchangeOutcome, PendingExchange, Tensors
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.exchange.tensors.fingerprint import Fingerprint
from evenly.exchange.tensors.optimizer_state import trained_entries
from evenly.schedule.adaptive import StepPace
from evenly.schedule.step_counter import Schedule
from evenly.spec import Exchange


class Averager(ABC):
    """The part of an `Exchanger` that averages and starts anew between the exchanges of its schedule."""

    buffers: Buffers
    _module: torch.nn.Module
    _schedule: Schedule
    _groups: Groups
    _replica_exchange: ReplicaExchange
    _settings: Exchange
    _payload_builder: PayloadBuilder
    _anchors: Anchors
    _step_pace: StepPace
    _loaded_weights: LoadedWeights
    _pending_exchanges: list[PendingExchange]  # under way
    _averages: bool  # parameters, which else never differ
    _differs: bool  # nodes may have different parameters though no step was made
    _restarts: int  # how often points began anew from loaded weights

    @property
    @abstractmethod
    def samples(self) -> float:
        """The samples of this rank since the oldest of the last snapshots."""

    @abstractmethod
    def meet(self, act: "Callable[[CollectiveWaiter], Any]", place: str = "") -> Any:
        """Returns act's result; an error on this rank is told to the others before it is raised."""

    @abstractmethod
    def _reporting(self) -> AbstractContextManager[None]:
        """Tells an error on this rank to the others before it is raised."""

    @abstractmethod
    def _ballot(self, layout: str, *, samples: float) -> Vote:
        """Returns what this rank brings to an exchange of what `layout` describes."""

    @abstractmethod
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
    ) -> ExchangeOutcome | None:
        """Returns what all ranks have agreed on."""

    @abstractmethod
    def _convene(
        self, vote: Vote, held: Fingerprint, waiter: CollectiveWaiter, *, since: int, everywhere: bool = False
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
        self._step_pace.drop()
        if self._groups.rank_group.size == 1:
            yield
            return
        with self._reporting():
            self._drain()
        entries, buffers = trained_entries(self._module), self.buffers.now()
        own = [*(entry.tensor for entry in entries), *buffers.values()]
        kept, agreed, differs = [tensor.detach().clone() for tensor in own], dict(self.buffers.agreed), self._differs
        try:
            with torch.no_grad(), self._reporting():
                loaded = self._loaded_weights.changed()
                self._differs |= bool(loaded)
                for pending_exchange in self._pending_exchanges:
                    if pending_exchange.outcome is not None:  # what is since its snapshot is what has to be averaged
                        self._payload_builder.unload(pending_exchange.payload, state=False, but=loaded)
                        merged = {
                            name: value
                            for name, value in pending_exchange.outcome.buffers.items()
                            if name not in loaded
                        }
                        self.buffers.put(merged, pending_exchange.snapshot, change=pending_exchange.payload.change)
                if self._schedule.since or self._pending_exchanges:
                    is_new = loaded >= {entry.home for entry in entries}  # no samples are behind it, as in finish()
                    self._average_now(parameters=True, samples=0.0 if is_new else self.samples)
                else:
                    self._average_rest()
            with self._loaded_weights.aside():
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
        vote = replace(self._ballot("a look", samples=0.0), changed=changed)
        held = self._payload_builder.fingerprint()
        quorum = self.meet(partial(self._convene, vote, held, since=0, everywhere=True))
        if quorum.differs or any(quorum.changed):
            self._average_now(parameters=quorum.differs, samples=float(self._replica_exchange.answers))

    def _average_now(self, *, parameters: bool, samples: float) -> None:
        """Puts the average over all nodes into the module, without codes or an outer optimizer."""
        payload = self._payload_builder.load_all() if parameters else self._payload_builder.load(())
        snapshot = self.buffers.snapshot()
        words = self._payload_builder.words(range(self._settings.fragments) if parameters else (), snapshot)
        vote = self._ballot(f"an average\n{words}", samples=samples)
        ways: Any = {"held": self._payload_builder.fingerprint(), "since": self._schedule.since, "exact": True}
        outcome = self.meet(partial(self._agree, payload, vote, snapshot, **ways))
        with torch.no_grad():
            self._payload_builder.unload(payload)
            self.buffers.put(outcome.buffers, snapshot, change=False)
        self._differs = False

    def take_loaded(self, *, everything: bool = False) -> None:
        """Goes on from what `load_state_dict` has put in since the last step, as if nodes had agreed on it.

        Exchanges under way no longer change it. With `everything` all of the network counts as loaded.
        """
        if not self._loaded_weights.any and not everything:
            return
        with self._reporting():
            names, of_optimizer = self._loaded_weights.take()
            trained = {entry.home for entry in trained_entries(self._module)}
            names |= {*trained, *self.buffers.policies} if everything else set()
            for pending_exchange in self._pending_exchanges:
                pending_exchange.loaded |= names
                pending_exchange.is_state_loaded |= of_optimizer
            if names & trained:
                self._differs = True
                self._restart(names & trained, trained)

    def _restart(self, loaded: set[str], trained: set[str]) -> None:
        """Forgets what led to the weights that were there before all of them were `loaded`."""
        if loaded == trained:
            self._forget_samples(range(self._settings.fragments))
        if not self._averages or not self._anchors.are_kept:
            return
        if loaded != trained:
            raise SpecError(
                f"load_state_dict has replaced {sorted(loaded)[0]!r}, but not {sorted(trained - loaded)[0]!r}, between "
                "two exchanges with an outer optimizer or a codec, which go on from the last agreed weights. Load all "
                "weights that train at once, or load before synchronize."
            )
        self._drain()  # what is under way still uses the points
        self._anchors.begin(self._payload_builder.load(range(self._settings.fragments)).parts, verified=False)
        self._restarts += 1
