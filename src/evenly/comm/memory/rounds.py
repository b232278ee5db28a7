"""What one round of a collective writes into this rank's slot and reads from the slots of all.

A slot holds a limited number of bytes; larger tensors take several rounds. Sums add the ranks' values in the order of
ranks on every rank, so that all have the same bits; 16-bit values are summed in float32 and rounded once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch

from evenly.comm.indexing.segments import Segments, count_of, part_of, put

Slots = Sequence[torch.Tensor]  # the bytes of each rank's slot

_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_CODES = {dtype: index + 1 for index, dtype in enumerate(_DTYPES)}
PIECE_BYTES = 1 << 18  # of a vector that several ranks' values are added to
_SUM, _MAX, _GATHER, _SCATTER, _DEAL, _BROADCAST = (number << 8 for number in range(1, 7))


class Round(Protocol):
    """One round of a collective; all ranks have the same `code` and `size` in it."""

    @property
    def code(self) -> int:
        """The kind of the collective and the type of its values."""

    @property
    def size(self) -> int:
        """How many values the collective has in this round."""

    @property
    def has_two_phases(self) -> bool:
        """Whether all ranks `reduce` after all have written and before any reads."""

    def span(self, source: int, reader: int | None) -> tuple[int, int]:
        """Returns the first byte and the end of what member `reader` reads in the slot of `source`; None: of all."""

    def write(self, slot: torch.Tensor) -> None:
        """Writes this rank's values into its slot."""

    def reduce(self, slots: Slots, rank: int) -> None:
        """Writes into this rank's slot what the others read."""

    def read(self, slots: Slots) -> None:
        """Reads the slots of all ranks."""


def describe(code: int) -> str:
    """Returns the words for the code of a round."""
    kinds = ("a sum", "a maximum", "a gather", "a scattered sum", "blocks for each rank", "a broadcast")
    kind, dtype = (code >> 8) - 1, (code & 255) - 1
    known = 0 <= kind < len(kinds) and 0 <= dtype < len(_DTYPES)
    return f"{kinds[kind]} ({str(_DTYPES[dtype]).removeprefix('torch.')})" if known else "something else"


def is_served(dtype: torch.dtype) -> bool:
    """Whether tensors of this type can be sent."""
    return dtype in _CODES


def _values(slot: torch.Tensor, dtype: torch.dtype, count: int, *, start: int = 0) -> torch.Tensor:
    """Returns `count` values from value `start` of a slot."""
    return slot[start * dtype.itemsize : (start + count) * dtype.itemsize].view(dtype)


def _add_up(values: Sequence[torch.Tensor], out: torch.Tensor, *, largest: bool = False) -> None:
    """Writes the sum of the ranks' values in their order, or the maximum; `out` may be the first or the second.

    On a CPU with more than two ranks a long vector is summed piece by piece, so that sums stay in the processor's cache
    until the last rank's values are added.
    """
    if len(values) > 2 and out.dim() == 1 and out.nbytes > 2 * PIECE_BYTES and out.device.type == "cpu":
        step = PIECE_BYTES // out.element_size()
        for start in range(0, len(out), step):
            _add_up([value[start : start + step] for value in values], out[start : start + step], largest=largest)
        return
    first, second, *others = values
    if largest:
        torch.maximum(first, second, out=out)
        for value in others:
            torch.maximum(out, value, out=out)
        return
    if out.dtype.itemsize < 4 and out.dtype.is_floating_point:
        total = first.float().add_(second)
        for value in others:
            total.add_(value)
        out.copy_(total)
        return
    torch.add(first, second, out=out)
    for value in others:
        out.add_(value)


@final
class SumRound:
    """The sum over ranks of a flat tensor of one length, or its maximum; of `source`, times `factor`, into `target`."""

    def __init__(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        largest: bool,
        has_two_phases: bool,
        factor: float | None = None,
    ) -> None:
        self.size = source.numel()
        self.code = (_MAX if largest else _SUM) + _CODES[source.dtype]
        self.has_two_phases = has_two_phases  # each rank sums a slice for all; otherwise each sums everything
        self._source = source
        self._target = target
        self._largest = largest
        self._factor = factor

    def span(self, source: int, reader: int | None) -> tuple[int, int]:
        """Returns all."""
        return 0, self._source.nbytes

    def write(self, slot: torch.Tensor) -> None:
        """Writes the values."""
        values = _values(slot, self._source.dtype, self.size)
        if self._factor is None:
            values.copy_(self._source)
        else:
            torch.mul(self._source, self._factor, out=values)

    def reduce(self, slots: Slots, rank: int) -> None:
        """Sums this rank's slice into its slot, where only this rank reads that slice."""
        start, stop = _slice(self.size, rank, len(slots))
        if start == stop:
            return
        values = [_values(slot, self._source.dtype, stop - start, start=start) for slot in slots]
        out = values[rank] if rank < 2 else torch.empty_like(values[0])
        _add_up(values, out, largest=self._largest)
        if rank >= 2:
            values[rank].copy_(out)

    def read(self, slots: Slots) -> None:
        """Reads the slices, or sums all."""
        dtype = self._source.dtype
        if not self.has_two_phases:
            _add_up([_values(slot, dtype, self.size) for slot in slots], self._target, largest=self._largest)
            return
        for rank, slot in enumerate(slots):
            start, stop = _slice(self.size, rank, len(slots))
            self._target[start:stop].copy_(_values(slot, dtype, stop - start, start=start))


def _slice(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Returns the values that a rank sums for all; slices begin at lines of the cache."""
    width = -(-size // (64 * num_ranks)) * 64
    return min(size, rank * width), min(size, (rank + 1) * width)


def sum_rounds(
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    largest: bool,
    slot_bytes: int,
    num_ranks: int,
    least_bytes: int | None,
    factor: float | None = None,
) -> Iterator[Round]:
    """Yields the rounds of a sum of flat tensors, this rank's times `factor`.

    From `least_bytes` on, if given, each rank sums a slice.
    """
    step = slot_bytes // source.element_size()
    for start in range(0, source.numel(), step):
        part = source[start : start + step]
        is_long = least_bytes is not None and part.nbytes >= least_bytes
        has_two_phases = num_ranks > 3 and is_long  # with three it saves too little for a wait
        yield SumRound(
            part, target[start : start + step], largest=largest, has_two_phases=has_two_phases, factor=factor
        )


@final
@dataclass(eq=False)
class GatherRound:
    """Collects a tensor of which rank r holds the indices `segments[r]` of `dim`."""

    part: torch.Tensor
    whole: torch.Tensor
    dim: int
    segments: Sequence[Segments]
    has_two_phases: bool = False

    def __post_init__(self) -> None:
        self.size = self.whole.numel()
        self.code = _GATHER + _CODES[self.whole.dtype]

    def span(self, source: int, reader: int | None) -> tuple[int, int]:
        """Returns the part of the source."""
        others = self.whole.numel() // max(1, self.whole.shape[self.dim])
        return 0, others * count_of(self.segments[source]) * self.whole.element_size()

    def write(self, slot: torch.Tensor) -> None:
        """Writes this rank's part."""
        if self.part.numel():
            _values(slot, self.part.dtype, self.part.numel()).view(self.part.shape).copy_(self.part)

    def reduce(self, slots: Slots, rank: int) -> None:
        """Does nothing."""

    def read(self, slots: Slots) -> None:
        """Copies the parts of all ranks to their indices."""
        shape = list(self.whole.shape)
        others = self.whole.numel() // max(1, shape[self.dim])
        for slot, ranges in zip(slots, self.segments, strict=True):
            shape[self.dim] = count_of(ranges)
            if shape[self.dim]:
                part = _values(slot, self.whole.dtype, others * shape[self.dim]).view(shape)
                put(self.whole, part, self.dim, ranges)


@final
@dataclass(eq=False)
class ScatterRound:
    """The sum over ranks of `summand`, of which rank r keeps the indices `segments[r]` of `dim`: into `target`."""

    summand: torch.Tensor
    target: torch.Tensor  # contiguous
    dim: int
    segments: Sequence[Segments]
    rank: int
    has_two_phases: bool = False

    def __post_init__(self) -> None:
        self.size = self.summand.numel()
        self.code = _SCATTER + _CODES[self.summand.dtype]

    def span(self, source: int, reader: int | None) -> tuple[int, int]:
        """Returns the values for the reader; a rank adds its own from where they are."""
        if reader is None:
            return 0, self.summand.nbytes
        if reader == source:
            return 0, 0
        others = self.summand.numel() // self.summand.shape[self.dim] * self.summand.element_size()
        start = others * sum(count_of(ranges) for ranges in self.segments[:reader])
        return start, start + others * count_of(self.segments[reader])

    def write(self, slot: torch.Tensor) -> None:
        """Writes the values for each other rank, one rank after another."""
        start, shape = 0, list(self.summand.shape)
        others = self.summand.numel() // shape[self.dim]
        for rank, ranges in enumerate(self.segments):
            shape[self.dim] = count_of(ranges)
            count = others * shape[self.dim]
            values = _values(slot, self.summand.dtype, count, start=start).view(shape)
            offset = 0
            for first, last in ranges if rank != self.rank else ():
                values.narrow(self.dim, offset, last - first).copy_(self.summand.narrow(self.dim, first, last - first))
                offset += last - first
            start += count

    def reduce(self, slots: Slots, rank: int) -> None:
        """Does nothing."""

    def read(self, slots: Slots) -> None:
        """Sums the values for this rank."""
        count, shape = self.target.numel(), self.target.shape
        if not count:
            return
        others = self.summand.numel() // self.summand.shape[self.dim]
        start = others * sum(count_of(ranges) for ranges in self.segments[: self.rank])
        values = [_values(slot, self.target.dtype, count, start=start).view(shape) for slot in slots]
        values[self.rank] = part_of(self.summand, self.dim, self.segments[self.rank])
        _add_up(values, self.target)


@final
@dataclass(eq=False)
class DealRound:
    """Sends a flat block to each rank and receives one from each; the block for rank r lies at `r * step`."""

    sent: Sequence[torch.Tensor]
    received: Sequence[torch.Tensor]
    rank: int
    step: int
    has_two_phases: bool = False

    def __post_init__(self) -> None:
        self.size = self.step
        self.code = _DEAL + _CODES[self.sent[0].dtype]

    def span(self, source: int, reader: int | None) -> tuple[int, int]:
        """Returns the block for the reader."""
        width = self.step * self.sent[0].element_size()
        return (0, len(self.sent) * width) if reader is None else (reader * width, (reader + 1) * width)

    def write(self, slot: torch.Tensor) -> None:
        """Writes the blocks for the other ranks."""
        for target, block in enumerate(self.sent):
            if block.numel() and target != self.rank:
                _values(slot, block.dtype, block.numel(), start=target * self.step).copy_(block)

    def reduce(self, slots: Slots, rank: int) -> None:
        """Does nothing."""

    def read(self, slots: Slots) -> None:
        """Reads the blocks for this rank."""
        if self.received[self.rank].numel():
            self.received[self.rank].copy_(self.sent[self.rank])
        for source, (slot, block) in enumerate(zip(slots, self.received, strict=True)):
            if block.numel() and source != self.rank:
                block.copy_(_values(slot, block.dtype, block.numel(), start=self.rank * self.step))


def deal_rounds(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], *, rank: int, largest: int, slot_bytes: int
) -> Iterator[Round]:
    """Yields the rounds in which flat blocks are dealt; no rank sends another one more than `largest` values."""
    step = slot_bytes // len(sent) // sent[0].element_size()
    for start in range(0, largest, step):
        given, taken = ([block[start : start + step] for block in blocks] for blocks in (sent, received))
        yield DealRound(given, taken, rank, step)


@final
@dataclass(eq=False)
class BroadcastRound:
    """Sends a flat tensor of rank `source` to the others, in place."""

    values: torch.Tensor
    source: int
    rank: int
    has_two_phases: bool = False

    def __post_init__(self) -> None:
        self.size = self.values.numel()
        self.code = _BROADCAST + _CODES[self.values.dtype]

    def span(self, source: int, reader: int | None) -> tuple[int, int]:
        """Returns the values, in the slot of their source."""
        return 0, self.values.nbytes if source == self.source else 0

    def write(self, slot: torch.Tensor) -> None:
        """Writes the values, on the source."""
        if self.rank == self.source:
            _values(slot, self.values.dtype, self.size).copy_(self.values)

    def reduce(self, slots: Slots, rank: int) -> None:
        """Does nothing."""

    def read(self, slots: Slots) -> None:
        """Reads the values, on the others."""
        if self.rank != self.source:
            self.values.copy_(_values(slots[self.source], self.values.dtype, self.size))
