"""Builds the payload of an exchange: parameters and optimizer state, whole or in fragments."""

import logging
from collections.abc import Collection, Sequence
from difflib import get_close_matches

import torch

from evenly.errors import SpecError
from evenly.exchange.payload import Payload
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.exchange.tensors.averaged_tensors import AveragedTensor, current_tensors, reset_state, trained_entries
from evenly.exchange.tensors.fingerprint import Fingerprint
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
        self._distinct = DistinctTensors()
        self._trained = _trained(module)
        self._names: list[str] = []
        self._are_slots_checked = False
        self._fragments: list[Piece] = []

    def reset_fragments(self) -> None:
        """Computes the fragments anew, after parts of the network moved between ranks."""
        self._trained, self._names = _trained(self._module), []

    @property
    def averaged_names(self) -> list[str]:
        """The names of the parameters that exchanges average."""
        return [entry.home for entry in trained_entries(self._module, self._distinct)] if self._is_sent else []

    def snapshot(self, fragments: Sequence[int], *, stateful: Sequence[int] = (), change: bool = False) -> Payload:
        """Returns a snapshot of these fragments; those in `stateful` include the optimizer's state."""
        return self._replica_exchange.snapshot(self._entries(fragments), self._state(stateful), change=change)

    def snapshot_all(self) -> Payload:
        """Returns a snapshot of all parameters, without anchors."""
        return self._replica_exchange.snapshot(
            {"": trained_entries(self._module, self._distinct)} if self._is_sent else {}
        )

    def fingerprint(self, fragments: Sequence[int] | None = None) -> Fingerprint:
        """Returns the fingerprint of this rank's part of these fragments, or of all trained parameters."""
        if fragments is None or not self._is_sent:
            return self._replica_exchange.fingerprint(trained_entries(self._module))
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

    def reset_state(self, fragments: Sequence[int]) -> None:
        """Sets the optimizer's state of these fragments to zero where the settings say so."""
        if fragments and self._is_sent and self._settings.treats_state("reset"):
            pieces = self._pieces(trained_entries(self._module, self._distinct))
            for fragment in fragments:
                reset_state(self._module, self._optimizer, pieces[fragment], self._is_reset)

    def _is_reset(self, slot: str) -> bool:
        return self._settings.policy_of(slot) == "reset"

    def _entries(self, fragments: Sequence[int]) -> dict[str, list[AveragedTensor]]:
        """Returns the parameters of each fragment, by the key of its anchors."""
        if not self._is_sent:
            return {}
        entries = trained_entries(self._module, self._distinct)
        pieces = self._pieces(entries)
        return {f"{fragment}": entries_in(entries, pieces[fragment]) for fragment in fragments}

    def _state(self, fragments: Sequence[int]) -> list[AveragedTensor]:
        """Returns the optimizer's state that is sent with these fragments."""
        if not fragments or not self._is_sent or not self._settings.treats_state("average"):
            return []
        slots = self._replica_exchange.state(self._module, self._optimizer)
        slots = [entry for entry in slots if self._settings.policy_of(entry.slot) == "average"]
        pieces = self._pieces(trained_entries(self._module, self._distinct))
        return [entry for fragment in fragments for entry in entries_in(slots, pieces[fragment])]

    def _pieces(self, entries: Sequence[AveragedTensor]) -> list[Piece]:
        """Returns the fragments of the trained `entries`."""
        if changed := sorted(self._trained ^ _trained(self._module)):
            case = "no longer trained" if changed[0] in self._trained else "trained now"
            raise SpecError(
                f"the parameter {changed[0]!r} is {case}, which was different when synchronize was called: ranks "
                "would diverge. Freeze parameters before, or call finish(), close() and synchronize again."
            )
        if self._names != [entry.home for entry in entries]:  # some may share memory now
            self._names = [entry.home for entry in entries]
            sizes = self._replica_exchange.sizes([(entry.home, entry.tensor) for entry in entries])
            self._fragments = split(entries, sizes, self._settings.fragments, rows=self._replica_exchange.splits_rows)
        return self._fragments


def _trained(module: torch.nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}
