"""Averages over all nodes outside the schedule, for evaluation, and restarts after load_state_dict."""

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
from evenly.exchange.loaded_weights import LoadedWeights
from evenly.exchange.membership import Quorum, Vote
from evenly.exchange.payload import Payload
from evenly.exchange.payload_builder import PayloadBuilder
from evenly.exchange.pending import ExchangeOutcome, PendingExchange, Tensors
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.exchange.tensors.fingerprint import Fingerprint
from evenly.exchange.tensors.optimizer_state import trained_entries
from evenly.schedule.adaptive import StepPace
from evenly.schedule.step_counter import Schedule
from evenly.spec import Exchange


class Averager(ABC):
    """The part of an `Exchanger` that averages for evaluation and restarts from loaded weights."""

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
    _pending_exchanges: list[PendingExchange]  # begun, not merged
    _averages: bool  # whether nodes average parameters; otherwise these never differ
    _differs: bool  # nodes may have different parameters although no step was made
    _restarts: int  # how often anchors were reset to loaded weights

    @property
    @abstractmethod
    def samples(self) -> float:
        """The samples of this rank since the oldest of the last snapshots."""

    @abstractmethod
    def run_collective(self, act: "Callable[[CollectiveWaiter], Any]", place: str = "") -> Any:
        """Returns the result of the collective `act`; reports an error on this rank to the others before raising it."""

    @abstractmethod
    def _reporting(self) -> AbstractContextManager[None]:
        """Reports an error on this rank to the others before it is raised."""

    @abstractmethod
    def _make_vote(self, layout: str, *, samples: float) -> Vote:
        """Returns the vote of this rank for an exchange of the tensors that `layout` describes."""

    @abstractmethod
    def _agree(
        self,
        payload: Payload,
        vote: Vote,
        snapshot: Tensors,
        waiter: CollectiveWaiter,
        *,
        fingerprint: Fingerprint,
        since: int,
        exact: bool = False,
    ) -> ExchangeOutcome | None:
        """Returns the outcome that all ranks agreed on."""

    @abstractmethod
    def _vote(
        self, vote: Vote, fingerprint: Fingerprint, waiter: CollectiveWaiter, *, since: int, everywhere: bool = False
    ) -> Quorum:
        """Returns the quorum after checking that ranks which must hold equal parameters do."""

    @abstractmethod
    def _drain(self) -> None:
        """Waits until all pending exchanges have completed; they are merged later."""

    @abstractmethod
    def _forget_samples(self, fragments: Sequence[int]) -> None:
        """Resets the sample counts of these fragments."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Puts the average over all nodes into the module; restores each node's state afterwards."""
        self._step_pace.drop()
        if self._groups.rank_group.size == 1:
            yield
            return
        with self._reporting():
            self._drain()
        entries, buffers = trained_entries(self._module), self.buffers.now()
        tensors = [*(entry.tensor for entry in entries), *buffers.values()]
        saved_values = [tensor.detach().clone() for tensor in tensors]
        agreed, differs = dict(self.buffers.agreed), self._differs
        try:
            with torch.no_grad(), self._reporting():
                loaded = self._loaded_weights.changed()
                self._differs |= bool(loaded)
                for pending_exchange in self._pending_exchanges:
                    if pending_exchange.outcome is not None:  # the changes since its snapshot are averaged below
                        self._payload_builder.unload(pending_exchange.payload, state=False, but=loaded)
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
                yield
        finally:
            self.buffers.agreed, self._differs = agreed, differs
            with torch.no_grad():
                for tensor, value in zip(tensors, saved_values, strict=True):
                    tensor.copy_(value)

    def _average_rest(self) -> None:
        """Averages what may differ although no step was made since the last exchange: buffers changed by a forward
        without a step, and parameters into which a change was merged, which leaves nodes different in the last bits.

        There are no samples since then, so all replicas have equal weight.
        """
        changed = self.buffers.changes(self.buffers.snapshot()).bits()
        vote = replace(self._make_vote("evaluation", samples=0.0), changed=changed)
        fingerprint = self._payload_builder.fingerprint()
        quorum = self.run_collective(partial(self._vote, vote, fingerprint, since=0, everywhere=True))
        if quorum.differs or any(quorum.changed):
            self._average_now(parameters=quorum.differs, samples=float(self._replica_exchange.counts_samples))

    def _average_now(self, *, parameters: bool, samples: float) -> None:
        """Puts the average over all nodes into the module, without codec or outer optimizer."""
        payload = self._payload_builder.load_all() if parameters else self._payload_builder.load(())
        snapshot = self.buffers.snapshot()
        description = self._payload_builder.describe(range(self._settings.fragments) if parameters else (), snapshot)
        vote = self._make_vote(f"an average\n{description}", samples=samples)
        fingerprint, since = self._payload_builder.fingerprint(), self._schedule.since
        agree = partial(self._agree, payload, vote, snapshot, fingerprint=fingerprint, since=since, exact=True)
        outcome = self.run_collective(agree)
        with torch.no_grad():
            self._payload_builder.unload(payload)
            self.buffers.put(outcome.buffers, snapshot, change=False)
        self._differs = False

    def take_loaded(self, *, everything: bool = False) -> None:
        """Takes the values loaded by `load_state_dict` since the last step as if nodes had agreed on them.

        Pending exchanges no longer change them. With `everything` the whole network counts as loaded.
        """
        if not self._loaded_weights.any and not everything:
            return
        with self._reporting():
            names, is_optimizer_loaded = self._loaded_weights.take()
            trained = {entry.home for entry in trained_entries(self._module)}
            names |= {*trained, *self.buffers.policies} if everything else set()
            for pending_exchange in self._pending_exchanges:
                pending_exchange.loaded |= names
                pending_exchange.is_state_loaded |= is_optimizer_loaded
            if names & trained:
                self._differs = True
                self._restart(names & trained, trained)

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
        self._anchors.begin(self._payload_builder.load(range(self._settings.fragments)).parts, verified=False)
        self._restarts += 1
