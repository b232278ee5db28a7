"""The tensors of one exchange, from the snapshot to the merge."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TypedDict, final

import torch

from evenly._torch.operators import add_all_, copy_all_
from evenly.comm.blocks.reducer import PackedSlice
from evenly.comm.blocks.replicas import FLAT
from evenly.comm.blocks.slice import Slice
from evenly.errors import CheckpointError
from evenly.exchange.tensors.averaged_tensors import AveragedTensor
from evenly.exchange.tensors.flat import CHUNK, Flat, real
from evenly.exchange.tensors.fragments import Piece

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf")
MOMENTA = ("momentum_buffer", "exp_avg", "grad_avg", "ax", "prev")


class PayloadEntryState(TypedDict):
    """A `PayloadEntry` in a checkpoint."""

    home: str
    label: str
    slot: str
    rows: list[int] | None  # the first row, and the row after the last
    value: torch.Tensor


@dataclass(frozen=True)
class PayloadEntry:
    """One tensor of a payload: the network's tensor as it is sent (complex numbers as pairs), and its value.

    The value is that of the snapshot at first. After the exchange it is the average over nodes or, if training went
    on meanwhile, the average minus the snapshot.
    """

    entry: AveragedTensor
    tensor: torch.Tensor
    value: torch.Tensor

    def with_current_tensor(self, tensors: Mapping[tuple[str, str], torch.Tensor]) -> "PayloadEntry":
        """Returns the same with the tensor that the network has now."""
        tensor, rows = tensors.get((self.entry.home, self.entry.slot)), self.entry.rows
        if tensor is None:
            return self
        return replace(self, tensor=real(tensor if rows is None else tensor[rows.start : rows.stop]))

    def saved(self) -> PayloadEntryState:
        """Returns the state for a checkpoint."""
        entry, value = self.entry, self.value
        rows = None if entry.rows is None else [entry.rows.start, entry.rows.stop]
        value = torch.view_as_complex(value.clone()) if entry.tensor.is_complex() else value
        return {"home": entry.home, "label": entry.label, "slot": entry.slot, "rows": rows, "value": value}


@final
class Packed:
    """A copy of entries in the dtype they are sent in: one entry in its shape, or all of them concatenated in a flat
    vector. Of a vector only the requested `ranges` are copied; the others are received. `is_on_host`: in host memory,
    where copies arrive later."""

    def __init__(
        self,
        entries: Sequence[AveragedTensor],
        dtype: torch.dtype,
        *,
        name: str = FLAT,
        ranges: Callable[[int], Sequence[tuple[int, int]]] | None = None,
        is_on_host: bool = False,
    ) -> None:
        self._entries = entries
        self._flat = Flat([entry.tensor for entry in entries], dtype, is_on_host=is_on_host)
        self._vector = self._flat.scratch()
        for start, stop in [(0, self._flat.total)] if ranges is None else ranges(self._flat.total):
            self._flat.pack(start, stop, self._vector[start:stop])
        self.item = name, self._vector if name == FLAT else self._vector.view(self._flat.tensors[0].shape)

    def unpack(self) -> None:
        """Writes the received values into the tensors of the entries."""
        self._flat.unpack(self._vector)

    @property
    def vector(self) -> torch.Tensor:
        """All values, one after another."""
        return self._vector

    def refill(self) -> None:
        """Copies the values of the tensors again."""
        self._flat.pack(0, self._flat.total, self._vector)
        if self._flat.tensors[0].is_cuda and not self._vector.is_cuda:
            torch.cuda.current_stream(self._flat.tensors[0].device).synchronize()

    def copy(self) -> "Packed":
        """Returns the same entries with a copy of the values."""
        other = copy(self)
        other._vector = self._vector.clone()
        other.item = self.item[0], other._vector.view(self.item[1].shape)
        return other

    def entries(self) -> list[PayloadEntry]:
        """Returns the entries with their values."""
        tensors = self._flat.tensors
        pieces = torch.split(self._vector, [tensor.numel() for tensor in tensors])
        each = zip(self._entries, tensors, pieces, strict=True)
        return [PayloadEntry(entry, tensor, piece.view(tensor.shape)) for entry, tensor, piece in each]


@final
class Payload:
    """A snapshot of parameters and optimizer state, and the slices of it that this rank owns.

    A `change` is for a network that keeps training meanwhile: x <- x + (average - snapshot).
    """

    def __init__(
        self,
        packed: Sequence[Packed],
        slices: Sequence[PackedSlice],
        *,
        change: bool,
        copied: torch.cuda.Event | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        self._copied = copied  # after which values in host memory are there
        self.packed = packed
        self.keys = keys  # of the anchor of each of `packed`
        self._is_used = False
        self.slices = slices
        self.change = change
        self.fragments: dict[int, Piece] = {}  # the parameters in each

    @property
    def parts(self) -> list[Slice]:
        """The slices that this rank owns."""
        self.wait_for_copies()
        return [packed_slice.part for packed_slice in self.slices]

    def wait_for_copies(self) -> None:
        """Returns when the values that were copied to host memory are there."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def scratch(self) -> "Payload":
        """Returns what to average in, without slices yet, as often as needed.

        That is a copy where training goes on meanwhile. Otherwise it is this payload: the network has the values.
        """
        self.wait_for_copies()
        if not self.change:
            for packed in self.packed if self._is_used else ():
                packed.refill()
            self._is_used = True
            return self
        payload = Payload([packed.copy() for packed in self.packed], (), change=False, keys=self.keys)
        payload.fragments = self.fragments
        return payload

    def take(self, averages: "Payload", *, change: bool) -> None:
        """Takes the averages that were computed in a copy, or as a `change` their difference to the snapshot."""
        for packed, average in zip(self.packed, averages.packed, strict=True) if averages is not self else ():
            if change:
                torch.sub(average.vector, packed.vector, out=packed.vector)
            else:
                packed.vector.copy_(average.vector)
        self.change = change

    def entries(self) -> list[PayloadEntry]:
        """Returns the tensors of the parameters and the optimizer's state, with their values."""
        return [piece for packed in self.packed for piece in packed.entries()]

    def saved(self) -> list[PayloadEntryState]:
        """Returns the values for a checkpoint, after the exchange."""
        return [piece.saved() for piece in self.entries()]

    def put(self, saved: Sequence[PayloadEntryState]) -> None:
        """Restores the values from a checkpoint."""
        pieces = self.entries()
        if [piece.entry.label for piece in pieces] != [row["label"] for row in saved]:
            raise CheckpointError(
                "the checkpoint has a pending exchange with other tensors than this run would send. Go on with the "
                "same model, optimizer and settings to the next exchange."
            )
        for piece, row in zip(pieces, saved, strict=True):
            value = torch.view_as_real(row["value"]) if row["value"].is_complex() else row["value"]
            piece.value.copy_(value)

    def drop(self, homes: Collection[str], *, state: bool) -> None:
        """Sets the changes of these parameters to zero, and with `state` those of the optimizer's state."""
        for piece in self.entries() if homes or state else ():
            if state if piece.entry.slot else piece.entry.home in homes:
                piece.value.zero_()

    def apply(
        self, tensors: Mapping[tuple[str, str], torch.Tensor], *, state: bool = True, but: Collection[str] = ()
    ) -> None:
        """Writes the averages, or adds the changes, to the network and with `state` to the optimizer.

        Parameters in `but` are left as they are.
        `tensors` are the current ones, by names and slots; they may have been replaced since the snapshot.
        """
        chosen = [piece for piece in self.entries() if piece.entry.slot or piece.entry.home not in but]
        updates = [piece.with_current_tensor(tensors) for piece in chosen]
        parameters = [piece for piece in updates if not piece.entry.slot]
        _apply_all(add_all_ if self.change else copy_all_, parameters)
        slots = sorted({piece.entry.slot for piece in updates if piece.entry.slot}) if state else []
        for slot in slots:
            pieces = [piece for piece in updates if piece.entry.slot == slot]
            if self.change:
                _add_state(slot, pieces)
            else:
                _apply_all(copy_all_, pieces)


def _apply_all(act: Callable[..., object], pieces: Sequence[PayloadEntry]) -> None:
    """Applies `act` to all tensors at once, in few kernel launches on a GPU; values on the host come in chunks."""
    if pieces and pieces[0].value.device == pieces[0].tensor.device:
        act([piece.tensor for piece in pieces], [piece.value for piece in pieces])
        return
    for tensor, value in _chunks(pieces):
        act([tensor], [value])


def _chunks(pieces: Sequence[PayloadEntry]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields rows of tensors, and their values on the device of these, all in the same memory.

    It is allocated before the first row is yielded: a device without room for it changes nothing.
    """
    pairs = [pair for piece in pieces for pair in _rows(piece)]
    sizes: dict[torch.dtype, int] = {}
    for _, value in pairs:
        sizes[value.dtype] = max(value.numel(), sizes.get(value.dtype, 0))
    there = {dtype: torch.empty(size, dtype=dtype, device=pairs[0][0].device) for dtype, size in sizes.items()}
    for tensor, value in pairs:
        moved = there[value.dtype][: value.numel()].view(value.shape)
        yield tensor, moved.copy_(value, non_blocking=True)


def _rows(piece: PayloadEntry) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns a tensor with its value, or some rows at a time of a large one."""
    tensor, value = piece.tensor, piece.value
    if not tensor.ndim or tensor.numel() <= CHUNK:
        return [(tensor, value)]
    rows = max(1, CHUNK * len(tensor) // tensor.numel())
    return list(zip(tensor.split(rows), value.split(rows), strict=True))


def _add_state(slot: str, pieces: Sequence[PayloadEntry]) -> None:
    """Adds in place; keeps squares, and unknown slots without negative values, at 0 or above."""
    least = [piece.tensor.amin() for piece in pieces if piece.tensor.numel()]
    if slot in MOMENTA or not least:
        _apply_all(add_all_, pieces)
        return
    floor = least[0].new_zeros((), dtype=torch.float64)
    if slot not in SQUARES:
        floor = torch.where(torch.stack([value.double() for value in least]).amin() >= 0, 0.0, -torch.inf)
    is_here = pieces[0].value.device == pieces[0].tensor.device
    for tensor, value in ((piece.tensor, piece.value) for piece in pieces) if is_here else _chunks(pieces):
        tensor.add_(value)
        torch.maximum(tensor, floor.to(tensor.dtype), out=tensor)
