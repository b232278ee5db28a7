"""Builds the payload of an exchange: parameters and optimizer state, whole or in fragments."""

import logging
from collections.abc import Collection, Sequence
from difflib import get_close_matches

import torch

from evenly.comm import CollectiveWaiter
from evenly.errors import CheckpointError, SpecError
from evenly.exchange.anchors import Anchors
from evenly.exchange.exchanged_parameters import ExchangedParameters
from evenly.exchange.payload import Packed, Payload, PayloadEntry, PayloadEntryState
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.exchange.tensors.averaged_tensors import (
    AveragedTensor,
    Rows,
    current_tensors,
    parameter_entries,
    reset_state,
)
from evenly.exchange.tensors.fingerprint import Fingerprint
from evenly.exchange.tensors.flat import real, travelling_dtype
from evenly.exchange.tensors.fragments import Piece, entries_in, split
from evenly.exchange.tensors.memory import DistinctTensors
from evenly.spec import Exchange

logger = logging.getLogger(__name__)


class PayloadBuilder:
    """Selects the parameters and optimizer state of a fragment; nothing unless `is_sent`."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        replica_exchange: ReplicaExchange,
        settings: Exchange,
        *,
        is_sent: bool,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._replica_exchange = replica_exchange
        self._settings, self._is_sent = settings, is_sent
        self.parameters = ExchangedParameters(module, fragments=settings.fragments)
        self._distinct = DistinctTensors()
        self._names: list[str] = []  # of the parameters in the fragments
        self._are_slots_checked = False
        self._fragments: list[Piece] = []

    def lay_out(self, names: Collection[str] | None = None) -> None:
        """Splits the parameters that the next exchange sends into fragments, or those with these names."""
        entries = self._sent() if names is None else self._named([n for n in self._parameter_names() if n in names])
        sizes = self._replica_exchange.sizes([(entry.home, entry.tensor) for entry in entries])
        self._names = [entry.home for entry in entries]
        self._fragments = split(entries, sizes, self._settings.fragments, rows=self._replica_exchange.splits_rows)

    @property
    def averaged_names(self) -> list[str]:
        """The names of the parameters that exchanges average."""
        return [entry.home for entry in self.differing()] if self._is_sent else []

    @property
    def laid_out(self) -> list[str]:
        """The names of the parameters in the fragments."""
        return list(self._names)

    @property
    def has_layout(self) -> bool:
        """Whether the fragments are those of the parameters that the next exchange sends."""
        return self._names == [entry.home for entry in self._sent()]  # others are trained, or some share memory now

    def follow_layout(self, anchors: Anchors, waiter: CollectiveWaiter, *, nodes: int) -> None:
        """Gives `anchors` the slices of the parameters that the next exchange sends; all ranks call it together.

        Parameters that were sent before keep their anchors and the state of the outer optimizer. New ones are equal on
        all nodes now. Those that are sent no more get the values of their anchors, which have the same bits everywhere.
        """
        former_entries, former_names = self._entries(range(self._settings.fragments)), self._names
        self.lay_out()
        new_values, slices = anchors.new_values(), {}
        for name, vectors in anchors.vectors().items():
            gathered = self._replica_exchange.gather_slices(former_entries, vectors, waiter)
            tensors = {
                entry.home: real(entry.tensor).to(travelling_dtype(entry.tensor), copy=True)
                for entry in self._named(self._names)
            }
            if name == "agreed":
                self._leave([piece for piece in gathered if piece.entry.home not in tensors])
            else:
                for tensor in tensors.values():
                    tensor.fill_(new_values[name])
            for piece in gathered:
                target, rows = tensors.get(piece.entry.home), piece.entry.rows
                if target is not None:
                    (target if rows is None else target[rows.start : rows.stop]).copy_(piece.value)
            entries = [AveragedTensor(home, home, tensor) for home, tensor in tensors.items()]
            by_key = {f"{index}": entries_in(entries, piece) for index, piece in enumerate(self._fragments)}
            slices[name] = self._replica_exchange.snapshot(by_key).parts
        self.parameters.make_exact(set(former_names) - set(self._names))
        anchors.rebuild(slices, nodes=nodes)

    def _leave(self, pieces: Sequence[PayloadEntry]) -> None:
        """Writes the agreed values of parameters that are sent no more."""
        with self.parameters.written_by_exchange():
            for piece in pieces:
                piece.tensor.copy_(piece.value)

    def differing(self) -> list[AveragedTensor]:
        """Returns the parameters that may differ between nodes."""
        return parameter_entries(self.parameters.differing())

    def snapshot(
        self, fragments: Sequence[int], *, stateful: Sequence[int] = (), change: bool = False, exact: bool = False
    ) -> Payload:
        """Returns a snapshot of these fragments; those in `stateful` include the optimizer's state.

        An `exact` one includes frozen parameters that differ between nodes in the last bits.
        """
        entries = self._entries(fragments, exact=exact)
        payload = self._replica_exchange.snapshot(entries, self._state(stateful), change=change)
        payload.writes = self.parameters.writes(self.parameters.differing() if exact else self.parameters.sent())
        payload.fragments = {fragment: self._fragments[fragment] for fragment in fragments}
        return payload

    def restored(self, pieces: Sequence[PayloadEntryState], fragments: Sequence[int]) -> Payload:
        """Returns the payload of a checkpoint's pending exchange, to be merged.

        Raises:
            CheckpointError: where it has state that this optimizer lacks.
        """
        tensors = current_tensors(self._module, self._optimizer)
        packed = []
        for piece in pieces:
            tensor = tensors.get((piece["home"], piece["slot"]))
            if tensor is None:
                raise CheckpointError(
                    f"the checkpoint has a pending exchange with {piece['slot'] or 'values'} of {piece['home']!r}, "
                    "which this run does not have. Go on with the same model, optimizer and settings to the next "
                    "exchange."
                )
            rows = None if piece["rows"] is None else Rows(*piece["rows"])
            part = tensor if rows is None else tensor[rows.start : rows.stop]
            entry = AveragedTensor(piece["home"], piece["label"], part, piece["slot"], rows)
            packed.append(Packed([entry], travelling_dtype(part)))
        payload = Payload(packed, (), change=True)
        payload.put(pieces)
        payload.fragments = {fragment: self._fragments[fragment] for fragment in fragments}
        return payload

    def snapshot_all(self) -> Payload:
        """Returns a snapshot of all parameters, without anchors."""
        payload = self._replica_exchange.snapshot({"": self.differing()} if self._is_sent else {})
        payload.writes = self.parameters.writes(self.parameters.differing())
        return payload

    def fingerprint(self, fragments: Sequence[int] | None = None) -> Fingerprint:
        """Returns the fingerprint of this rank's part of these fragments, or of all that may differ between nodes."""
        if fragments is None or not self._is_sent:
            return self._replica_exchange.fingerprint(self.differing())
        return self._replica_exchange.fingerprint([e for entries in self._entries(fragments).values() for e in entries])

    def describe(
        self,
        fragments: Sequence[int],
        buffers: dict[str, torch.Tensor],
        *,
        stateful: Sequence[int] = (),
        exact: bool = False,
    ) -> str:
        """Returns a text that names what is about to be sent."""
        self._require_slots()
        chosen = [entry for entries in self._entries(fragments, exact=exact).values() for entry in entries]
        entries = [*chosen, *self._state(stateful)]
        named = [*((entry.home, entry.tensor) for entry in entries), *buffers.items()]
        labels = [*(entry.label for entry in entries), *buffers]
        return "\n".join(
            f"{label} {size}" for label, size in zip(labels, self._replica_exchange.sizes(named), strict=True)
        )

    def apply(self, payload: Payload, *, state: bool = True, but: Collection[str] = ()) -> None:
        """Writes the agreed values into the network's current tensors, `but` for some, and into the optimizer."""
        with self.parameters.written_by_exchange():
            payload.apply(current_tensors(self._module, self._optimizer), state=state, but=but)

    def record_merged(self, payload: Payload, fragments: Sequence[int], stateful: Sequence[int]) -> None:
        """Records that a payload of these fragments was applied: nodes agree on frozen parameters in them.

        Where optimizer state is averaged or reset, they are sent until that has been done, too.
        """
        treats_state = self._settings.treats_state("average") or self._settings.treats_state("reset")
        self.parameters.merged(payload.writes, stateful if treats_state else fragments, is_exact=not payload.change)

    def _require_slots(self) -> None:
        """Raises `SpecError` if the settings name a slot that the optimizer lacks; checked once it has state."""
        policies = self._settings.optimizer_state
        if self._are_slots_checked or isinstance(policies, str):
            return
        slots = sorted({str(slot) for state in self._optimizer.state.values() for slot in state})
        self._are_slots_checked = bool(slots)
        for slot in [slot for slot in policies if slots and slot not in slots]:
            case = f"optimizer_state names {slot!r}, but {type(self._optimizer).__name__} has {', '.join(slots)}"
            if get_close_matches(slot, slots):
                raise SpecError(f"{case}. Name one of these.")
            logger.warning("%s so far", case)  # some optimizers create state later

    def reset_state(self, payload: Payload, fragments: Sequence[int]) -> None:
        """Sets the optimizer's state of these fragments of a payload to zero where the settings say so."""
        if fragments and self._is_sent and self._settings.treats_state("reset"):
            for fragment in fragments:
                reset_state(self._module, self._optimizer, payload.fragments[fragment], self._is_reset)

    def _is_reset(self, slot: str) -> bool:
        return self._settings.policy_of(slot) == "reset"

    def _sent(self) -> list[AveragedTensor]:
        return parameter_entries(self.parameters.sent(), self._distinct)

    def _entries(self, fragments: Sequence[int], *, exact: bool = False) -> dict[str, list[AveragedTensor]]:
        """Returns the parameters of each fragment, by the key of its anchors; "" for those without."""
        if not self._is_sent:
            return {}
        entries = self._named(self._names)
        chosen = {f"{fragment}": entries_in(entries, self._fragments[fragment]) for fragment in fragments}
        inexact = parameter_entries(self.parameters.inexact()) if exact else []
        return {**chosen, "": inexact} if inexact else chosen

    def _state(self, fragments: Sequence[int]) -> list[AveragedTensor]:
        """Returns the optimizer's state that is sent with these fragments."""
        if not fragments or not self._is_sent or not self._settings.treats_state("average"):
            return []
        slots = self._replica_exchange.state(self._module, self._optimizer)
        slots = [entry for entry in slots if self._settings.policy_of(entry.slot) == "average"]
        return [entry for fragment in fragments for entry in entries_in(slots, self._fragments[fragment])]

    def _named(self, names: Sequence[str]) -> list[AveragedTensor]:
        parameters = dict(self._module.named_parameters())
        return [AveragedTensor(name, name, parameters[name]) for name in names]

    def _parameter_names(self) -> list[str]:
        return [name for name, _ in self._module.named_parameters()]
