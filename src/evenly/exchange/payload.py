"""What one exchange carries, from the snapshot to the merge."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from evenly._torch.operators import add_all_, copy_all_
from evenly.comm.blocks.reducer import PackedSlice
from evenly.comm.blocks.replicas import FLAT
from evenly.comm.blocks.slice import Slice
from evenly.errors import CheckpointError
from evenly.exchange.tensors.flat import Flat, real
from evenly.exchange.tensors.optimizer_state import StateEntry

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf")
MOMENTA = ("momentum_buffer", "exp_avg", "grad_avg", "ax", "prev")


@dataclass(frozen=True)
class Agreed:
    """An entry, its tensor as it travels (complex numbers as pairs), and what was agreed on for it."""

    entry: StateEntry
    tensor: torch.Tensor
    value: torch.Tensor

    def lying_in(self, held: Mapping[tuple[str, str], torch.Tensor]) -> "Agreed":
        """Returns the same for the tensor that is there now."""
        tensor, rows = held.get((self.entry.home, self.entry.slot)), self.entry.rows
        if tensor is None:
            return self
        return replace(self, tensor=real(tensor if rows is None else tensor[rows.start : rows.stop]))

    def saved(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        entry, value = self.entry, self.value
        rows = None if entry.rows is None else [entry.rows.start, entry.rows.stop]
        value = torch.view_as_complex(value.clone()) if entry.tensor.is_complex() else value
        return {"home": entry.home, "label": entry.label, "slot": entry.slot, "rows": rows, "value": value}


@final
class Packed:
    """A copy of entries in the type they travel in: one entry in its shape, or all of them one after another in a flat
    vector. Of a vector only the `ranges` that are asked for are copied, the others arrive."""

    def __init__(
        self,
        entries: Sequence[StateEntry],
        dtype: torch.dtype,
        *,
        name: str = FLAT,
        ranges: Callable[[int], Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        self._entries, self._flat = entries, Flat([entry.tensor for entry in entries], dtype)
        self._vector = self._flat.scratch()
        for start, stop in [(0, self._flat.total)] if ranges is None else ranges(self._flat.total):
            self._flat.pack(start, stop, self._vector[start:stop])
        self.item = name, self._vector if name == FLAT else self._vector.view(self._flat.tensors[0].shape)

    def unpack(self) -> None:
        """Puts what has arrived into the tensors of the entries."""
        self._flat.unpack(self._vector)

    def agreed(self) -> list[Agreed]:
        """Returns the entries with what was agreed on for each."""
        tensors = self._flat.tensors
        pieces = torch.split(self._vector, [tensor.numel() for tensor in tensors])
        each = zip(self._entries, tensors, pieces, strict=True)
        return [Agreed(entry, tensor, piece.view(tensor.shape)) for entry, tensor, piece in each]


@final
class Payload:
    """A snapshot of parameters and of optimizer state, taken when it is made, and what this rank speaks for of it.

    A `change` is for a network that trains on meanwhile: x <- x + (agreed - snapshot).
    """

    def __init__(self, packed: Sequence[Packed], bundles: Sequence[PackedSlice], *, change: bool) -> None:
        self.packed = packed
        self.bundles = bundles
        self.change = change

    @property
    def parts(self) -> list[Slice]:
        """What this rank speaks for."""
        return [bundle.part for bundle in self.bundles]

    def agreed(self) -> list[Agreed]:
        """Returns what was agreed on for the parameters and the optimizer's state."""
        return [piece for packed in self.packed for piece in packed.agreed()]

    def saved(self) -> list[dict[str, Any]]:
        """Returns what a checkpoint keeps of what was agreed on."""
        return [piece.saved() for piece in self.agreed()]

    def put(self, saved: Sequence[dict[str, Any]]) -> None:
        """Takes over what was agreed on from a checkpoint."""
        own = self.agreed()
        if [piece.entry.label for piece in own] != [row["label"] for row in saved]:
            raise CheckpointError(
                "the checkpoint has an exchange under way that carries other tensors than this run would. Go on with "
                "the same model, optimizer and settings to the next exchange."
            )
        for piece, row in zip(own, saved, strict=True):
            value = torch.view_as_real(row["value"]) if row["value"].is_complex() else row["value"]
            piece.value.copy_(value)

    def drop(self, homes: Collection[str], *, state: bool) -> None:
        """Changes nothing of these parameters, and with `state` nothing of the optimizer; it must be a change."""
        for piece in self.agreed() if homes or state else ():
            if state if piece.entry.slot else piece.entry.home in homes:
                piece.value.zero_()

    def unload(
        self, held: Mapping[tuple[str, str], torch.Tensor], *, state: bool = True, but: Collection[str] = ()
    ) -> None:
        """Puts what was agreed on into the network `but` for some parameters and, with `state`, into the optimizer.

        `held` are their tensors as they lie now, by names and slots; since the snapshot they may have been replaced.
        """
        found = [piece.lying_in(held) for piece in self.agreed() if piece.entry.slot or piece.entry.home not in but]
        parameters = [piece for piece in found if not piece.entry.slot]
        _together(add_all_ if self.change else copy_all_, parameters)
        slots = sorted({piece.entry.slot for piece in found if piece.entry.slot}) if state else []
        for slot in slots:
            pieces = [piece for piece in found if piece.entry.slot == slot]
            if self.change:
                _add_state(slot, pieces)
            else:
                _together(copy_all_, pieces)


def _together(act: Callable[..., object], pieces: Sequence[Agreed]) -> None:
    """Lets `act` change all tensors at once, which a GPU does in few launches."""
    if pieces:
        act([piece.tensor for piece in pieces], [piece.value for piece in pieces])


def _add_state(slot: str, pieces: Sequence[Agreed]) -> None:
    """Adds in place; squares do not fall below 0, nor does a slot of an unknown name that is nowhere below it."""
    least = [piece.tensor.amin() for piece in pieces if piece.tensor.numel()]
    if slot in MOMENTA or not least:
        _together(add_all_, pieces)
        return
    floor = least[0].new_zeros((), dtype=torch.float64)
    if slot not in SQUARES:
        floor = torch.where(torch.stack([value.double() for value in least]).amin() >= 0, 0.0, -torch.inf)
    for piece in pieces:
        piece.tensor.add_(piece.value)
        torch.maximum(piece.tensor, floor.to(piece.tensor.dtype), out=piece.tensor)
