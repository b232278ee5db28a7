"""Builds the payload of an exchange: parameters and optimizer state, whole or in fragments."""

import logging
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

import torch

from evenly.comm import CollectiveWaiter, local_tensor
from evenly.errors import CheckpointError, SpecError
from evenly.exchange.anchors import Anchors
from evenly.exchange.exchanged_parameters import ExchangedParameters
from evenly.exchange.payload import Packed, Payload, PayloadEntryState
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
        self.parameters = ExchangedParameters(module)
        self._distinct = DistinctTensors()
        self._names: list[str] = []  # of the parameters in the fragments
        self._are_slots_checked = False
        self._fragments: list[Piece] = []

    def lay_out(self, names: Collection[str] | None = None) -> None:
        """Splits the parameters that the next exchange sends into fragments, or those with these names."""
        entries = self._distinct_entries()
        if names is not None:
            entries = self._named([name for name, _ in self._module.named_parameters() if name in names])
        sizes = self._replica_exchange.sizes([(entry.home, entry.tensor) for entry in entries])
        self._names = [entry.home for entry in entries]
        self._fragments = split(entries, sizes, self._settings.fragments, rows=self._replica_exchange.splits_rows)

    @property
    def averaged_names(self) -> list[str]:
        """The names of the parameters that exchanges average."""
        return [entry.home for entry in self.entries()] if self._is_sent else []

    @property
    def laid_out(self) -> list[str]:
        """The names of the parameters in the fragments."""
        return list(self._names)

    @property
    def has_layout(self) -> bool:
        """Whether the fragments are those of the parameters that the next exchange sends."""
        homes = [entry.home for entry in self._distinct_entries()]
        return self._names == homes  # others are trained, or some share memory now

    def follow_layout(self, anchors: Anchors, waiter: CollectiveWaiter, *, nodes: int) -> None:
        """Gives `anchors` the slices of the parameters that the next exchange sends; all ranks call it together.

        Parameters that were sent before keep their anchors and the state of the outer optimizer. New ones are equal on
        all nodes now.
        """
        former_entries = self._entries(range(self._settings.fragments))
        self.lay_out()
        self.cut_anchors(anchors, self.full_anchors(anchors, waiter, entries=former_entries), nodes=nodes)

    def full_anchors(
        self,
        anchors: Anchors,
        waiter: CollectiveWaiter,
        *,
        entries: Mapping[str, Sequence[AveragedTensor]] | None = None,
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Returns what anchors keep as full tensors, by name and parameter; all ranks of the node call it together.

        `entries` are those that the anchors were made of, if they are laid out in another way now.
        """
        if entries is None:
            entries = self._entries(range(self._settings.fragments))
        new_values, full = anchors.new_values(), {}
        for name, vectors in anchors.vectors().items():
            gathered = self._replica_exchange.gather_slices(entries, vectors, waiter)
            tensors = {
                entry.home: real(entry.tensor).to(travelling_dtype(entry.tensor), copy=True)
                for entry in self._named(self._names)
            }
            if name in new_values:
                for tensor in tensors.values():
                    tensor.fill_(new_values[name])
            for piece in gathered:
                target, rows = tensors.get(piece.entry.home), piece.entry.rows
                if target is not None:
                    (target if rows is None else target[rows.start : rows.stop]).copy_(piece.value)
            full[name] = tensors
        return full

    def cut_anchors(self, anchors: Anchors, full: Mapping[str, Mapping[str, torch.Tensor]], *, nodes: int) -> None:
        """Gives `anchors` this rank's slices of the full tensors that `full_anchors` returned, here or on another node.

        A vector that is not among them, as the encoding errors of another node, begins anew.
        """
        new_values, slices = anchors.new_values(), {}
        for name in anchors.names():
            tensors = full.get(name) or {
                home: torch.full_like(tensor, new_values[name]) for home, tensor in full["agreed"].items()
            }
            entries = [AveragedTensor(home, home, tensor) for home, tensor in tensors.items()]
            by_key = {f"{index}": entries_in(entries, piece) for index, piece in enumerate(self._fragments)}
            slices[name] = self._replica_exchange.snapshot(by_key).parts
        anchors.rebuild(slices, nodes=nodes)

    def entries(self) -> list[AveragedTensor]:
        """Returns the parameters that exchanges average."""
        return parameter_entries(self.parameters.current())

    def snapshot(self, fragments: Sequence[int], *, stateful: Sequence[int] = (), change: bool = False) -> Payload:
        """Returns a snapshot of these fragments; those in `stateful` include the optimizer's state."""
        payload = self._replica_exchange.snapshot(self._entries(fragments), self._state(stateful), change=change)
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
            packed.append(Packed([entry], travelling_dtype(part), is_on_host=self._settings.offload))
        payload = Payload(packed, (), change=True)
        payload.put(pieces)
        payload.fragments = {fragment: self._fragments[fragment] for fragment in fragments}
        return payload

    def snapshot_all(self) -> Payload:
        """Returns a snapshot of all parameters, without anchors."""
        return self._replica_exchange.snapshot({"": self.entries()} if self._is_sent else {})

    def fingerprint(self, fragments: Sequence[int] | None = None) -> Fingerprint:
        """Returns the fingerprint of this rank's part of these fragments, or of all parameters that are exchanged."""
        if fragments is None or not self._is_sent:
            return self._replica_exchange.fingerprint(self.entries())
        return self._replica_exchange.fingerprint([e for entries in self._entries(fragments).values() for e in entries])

    def describe(
        self, fragments: Sequence[int], buffers: dict[str, torch.Tensor], *, stateful: Sequence[int] = ()
    ) -> str:
        """Returns a text that names what is about to be sent."""
        self._require_slots()
        chosen = [entry for entries in self._entries(fragments).values() for entry in entries]
        entries = [*chosen, *self._state(stateful)]
        named = [*((entry.home, entry.tensor) for entry in entries), *buffers.items()]
        labels = [*(entry.label for entry in entries), *buffers]
        return "\n".join(
            f"{label} {size}" for label, size in zip(labels, self._replica_exchange.sizes(named), strict=True)
        )

    def apply(self, payload: Payload, *, state: bool = True, but: Collection[str] = ()) -> None:
        """Writes the agreed values into the network's current tensors, `but` for some, and into the optimizer."""
        payload.apply(current_tensors(self._module, self._optimizer), state=state, but=but)

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

    def _distinct_entries(self) -> list[AveragedTensor]:
        """Returns the parameters that exchanges average, of those that share memory the first."""
        return parameter_entries(self.parameters.current(), self._distinct)

    def _entries(self, fragments: Sequence[int]) -> dict[str, list[AveragedTensor]]:
        """Returns the parameters of each fragment, by the key of its anchors."""
        if not self._is_sent:
            return {}
        entries = self._named(self._names)
        return {f"{fragment}": entries_in(entries, self._fragments[fragment]) for fragment in fragments}

    def _state(self, fragments: Sequence[int]) -> list[AveragedTensor]:
        """Returns the optimizer's state that is sent with these fragments."""
        if not fragments or not self._is_sent or not self._settings.treats_state("average"):
            return []
        slots = self._replica_exchange.state(self._module, self._optimizer)
        slots = [entry for entry in slots if self._settings.policy_of(entry.slot) == "average"]
        return [entry for fragment in fragments for entry in entries_in(slots, self._fragments[fragment])]

    def _named(self, names: Sequence[str]) -> list[AveragedTensor]:
        parameters = dict(self._module.named_parameters())
        return [AveragedTensor(name, name, local_tensor(parameters[name])) for name in names]
