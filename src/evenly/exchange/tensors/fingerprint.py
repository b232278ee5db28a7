"""Fingerprints: a few numbers that tell before an exchange whether ranks hold the same parameters.

A fingerprint is a weighted sum of all elements, f = sum_i w_i x_i, with fixed pseudo-random weights, together with the
rounding unit of the sum, u = eps ||x||: ranks on different devices round differently in each step, which is no
divergence. Each precision has its own sum: rounding errors of bfloat16 would hide changes in float32.
"""

import hashlib
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from evenly.comm import LocalShard
from evenly.exchange.tensors.flat import CHUNK, real

COLUMNS = 512
LARGE = 2**18  # elements; smaller tensors are concatenated first, because many small operations are slow
ITEM_SIZES = (2, 4, 8)  # bytes of an element: the precisions; smaller ones count as 2
TOLERANCE = 16.0  # in rounding units, between ranks after one step; it grows with the square root of the steps
TOLERANCE_ALIKE = 64.0  # between ranks on devices of one kind, in rounding units of a single element of average size
SALT = 790  # chosen so that sums over 16 to 512 equal elements are as large as those over random ones
UNLIKE = math.nan  # equal to nothing


@dataclass(frozen=True)
class FingerprintValues:
    """The fingerprint of a network as numbers: a sum and its rounding unit for each precision."""

    values: tuple[float, ...] = (0.0,) * len(ITEM_SIZES)
    units: tuple[float, ...] = (0.0,) * len(ITEM_SIZES)
    platform: float = UNLIKE  # equal where the same operations give the same bits

    @property
    def row(self) -> tuple[float, ...]:
        """All numbers; those of several ranks that hold a network together may be added."""
        return (*self.values, *self.units, self.platform)

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "FingerprintValues":
        """Returns what `row` was made from."""
        return cls(tuple(row[: len(ITEM_SIZES)]), tuple(row[len(ITEM_SIZES) : -1]), row[-1])


NO_FINGERPRINT = FingerprintValues()


@dataclass(frozen=True)
class _Piece:
    """A tensor of a fingerprint."""

    name: str
    rows: int  # number of its row sums
    elements: int
    eps: float
    precision: int  # index in ITEM_SIZES


class Fingerprint:
    """Weighted sums over parts of tensors, started at construction; `read` copies them from the device."""

    def __init__(self, pieces: Sequence[_Piece], weighted: torch.Tensor, code: float) -> None:
        self._pieces = pieces  # in the order of their precision
        self._weighted = weighted  # sums of rows, times the weights of the rows: [rows], float64
        self._platform = code
        self._precisions = sorted({piece.precision for piece in pieces})
        totals = []
        rows = [sum(p.rows for p in pieces if p.precision == precision) for precision in self._precisions]
        for precision, part in zip(self._precisions, torch.split(weighted, rows), strict=True):
            eps = max(piece.eps for piece in pieces if piece.precision == precision)
            totals += [part.sum(), torch.linalg.vector_norm(part) * eps]
        self._totals = torch.stack(totals) if totals else weighted

    @property
    def elements(self) -> list[int]:
        """How many elements of each precision there are."""
        precisions = range(len(ITEM_SIZES))
        return [sum(p.elements for p in self._pieces if p.precision == precision) for precision in precisions]

    def read(self) -> FingerprintValues:
        """Returns the fingerprint in numbers."""
        numbers = self._totals.tolist()
        values, units = list(NO_FINGERPRINT.values), list(NO_FINGERPRINT.units)
        for index, precision in enumerate(self._precisions):
            values[precision], units[precision] = numbers[2 * index], numbers[2 * index + 1]
        return FingerprintValues(tuple(values), tuple(units), self._platform)

    def by_tensor(self) -> list[tuple[str, float, float, int]]:
        """Returns name, fingerprint, rounding unit and elements of each tensor."""
        parts = torch.split(self._weighted.cpu(), [piece.rows for piece in self._pieces])
        return [
            (piece.name, float(part.sum()), float(torch.linalg.vector_norm(part)) * piece.eps, piece.elements)
            for piece, part in zip(self._pieces, parts, strict=True)
        ]


NO_TENSORS = Fingerprint(
    [], torch.zeros(0, dtype=torch.float64, device="cpu"), UNLIKE
)  # of a rank that is not compared


@torch.no_grad()
def fingerprint(tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    """Returns the fingerprint of tensors with the same layout on all ranks."""
    vectors = {name: real(tensor).reshape(-1) for name, tensor in tensors.items() if tensor.numel()}
    pieces, sums = [], [torch.zeros(0, dtype=torch.float64, device=_device(vectors))]
    for precision in range(len(ITEM_SIZES)):
        for dtype in sorted({v.dtype for v in vectors.values() if _precision(v) == precision}, key=str):
            vectors_of_dtype = {name: vector for name, vector in vectors.items() if vector.dtype == dtype}
            small = {name: vector for name, vector in vectors_of_dtype.items() if vector.numel() < LARGE}
            if small:
                padding = torch.zeros(COLUMNS, dtype=dtype, device=sums[0].device)
                sums.append(
                    _row_sums(torch.cat([t for v in small.values() for t in (v, padding[: -len(v) % COLUMNS])]))
                )
                pieces += [_piece(name, vector, -(-len(vector) // COLUMNS)) for name, vector in small.items()]
            for name, vector in vectors_of_dtype.items():
                if vector.numel() >= LARGE:
                    sums.append(_row_sums(vector))
                    pieces.append(_piece(name, vector, len(sums[-1])))
    all_sums = torch.cat(sums)  # [rows]
    weighted = all_sums * _row_weights(len(all_sums), all_sums.device)
    return Fingerprint(pieces, weighted, _platform_code(all_sums.device, torch.get_num_threads()))


@torch.no_grad()
def placed_fingerprint(pairs: Mapping[str, tuple[torch.Tensor, LocalShard | None]], *, counts_all: bool) -> Fingerprint:
    """Returns this rank's part of the fingerprint of a network that is cut over ranks; the parts are summed.

    Weights depend on global indices, so replicas may be cut in different ways. A tensor that all ranks of the replica
    hold is counted by the one rank with `counts_all`.
    """
    pieces, sums, indices = [], [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.int64)]
    numbered = list(enumerate(pairs.items()))
    for number, (name, (tensor, placement)) in sorted(numbered, key=lambda item: _precision(item[1][1][0])):
        shard_sums, shard_indices = _shard_sums(tensor, placement, counts_all=counts_all)
        pieces.append(_piece(name, tensor, len(shard_sums)))
        sums.append(shard_sums.cpu())
        indices.append(shard_indices.cpu() + 1001 * number)
    weighted = torch.cat(sums) * _weights(torch.cat(indices) + 7919)
    return Fingerprint(pieces, weighted, UNLIKE)  # replicas sum in different orders


def apart(values: Sequence[float], units: Sequence[float], *, steps: int, alike: int = 0) -> list[int]:
    """Returns the indices of `values` that differ from the first by more than rounding in `steps` explains.

    `alike` is the number of elements per value if all ranks use devices of one kind, which round alike; else 0.
    """
    tolerance = TOLERANCE_ALIKE / math.sqrt(alike) if alike else math.inf
    tolerance = min(tolerance, TOLERANCE * math.sqrt(1 + steps))
    differing = []
    for index, (value, unit) in enumerate(zip(values, units, strict=True)):
        both_undefined = not math.isfinite(value) and not math.isfinite(values[0])
        if not both_undefined and not abs(value - values[0]) <= tolerance * max(unit, units[0]):
            differing.append(index)
    return differing


def are_apart(rows: Sequence[FingerprintValues], elements: Sequence[int], *, steps: int) -> bool:
    """Returns whether replicas differ by more than rounding in `steps` explains; `elements` by precision."""
    is_alike = all(row.platform == rows[0].platform for row in rows)
    return any(
        apart(
            [row.values[precision] for row in rows],
            [row.units[precision] for row in rows],
            steps=steps,
            alike=count if is_alike else 0,
        )
        for precision, count in enumerate(elements)
    )


def _shard_sums(
    tensor: torch.Tensor, placement: LocalShard | None, *, counts_all: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weighted sums for each index of the first dim, and these indices in the full tensor."""
    cut = placement.dim if placement is not None else None
    if not tensor.numel() or (cut is None and not counts_all):
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    values = _wide(real(tensor.detach().reshape(1) if not tensor.ndim else tensor.detach()))
    indices = [torch.arange(size) for size in values.shape]
    if placement is not None and cut is not None:
        indices[cut] = torch.cat([torch.arange(*segment) for segment in placement.segments[placement.shard_group.rank]])
    with torch.autocast(values.device.type, enabled=False):
        for dim in range(values.ndim - 1, 0, -1):
            values = values @ _weights(indices[dim] + 104729 * dim).to(values)
    return values.double(), indices[0]


def _row_sums(vector: torch.Tensor) -> torch.Tensor:
    """Returns weighted sums of rows of a vector: [rows], float64."""
    if vector.dtype.itemsize < 4 and len(vector) > CHUNK:  # wider copies, of chunks only
        return torch.cat([_row_sums(chunk) for chunk in vector.split(CHUNK)])
    vector = _wide(vector)
    weights = _column_weights(vector.dtype, vector.device)
    whole = vector.numel() // COLUMNS * COLUMNS
    with torch.autocast(vector.device.type, enabled=False):
        sums = [vector[:whole].view(-1, COLUMNS) @ weights] if whole else []
        if rest := vector.numel() - whole:
            sums.append((vector[whole:] @ weights[:rest]).view(1))
    return torch.cat(sums).double()


def _weights(indices: torch.Tensor) -> torch.Tensor:
    """Returns a weight for each index, of magnitude 0.5 to 1 and of either sign.

    It is an integer hash, so the same on every device.
    """
    mixed = indices.long() + SALT
    for factor in (0x45D9F3B, 0x119DE1F3):
        mixed = ((mixed >> 16) ^ mixed) * factor & 0xFFFFFFFF
    size = (((mixed >> 16) ^ mixed) & 0xFFFFFF).double() / 2**25 + 0.5
    return torch.where((mixed & 0x40000000) != 0, size, -size)


@cache
def _column_weights(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _weights(torch.arange(COLUMNS, device=device)).to(dtype)


@lru_cache(maxsize=8)  # those of the fragments of one network
def _row_weights(rows: int, device: torch.device) -> torch.Tensor:
    return _weights(torch.arange(rows, device=device) + 7919)


@cache
def _platform_code(device: torch.device, threads: int) -> float:
    """Returns a number that is the same on ranks where elementwise operations give the same bits."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {threads} threads"
    words = f"{device.type} {name} torch {torch.__version__}"
    return float(int.from_bytes(hashlib.sha256(words.encode()).digest()[:6]))  # exact in a float64


def _piece(name: str, tensor: torch.Tensor, rows: int) -> _Piece:
    return _Piece(name, rows, tensor.numel(), torch.finfo(tensor.dtype).eps, _precision(tensor))


def _precision(tensor: torch.Tensor) -> int:
    return ITEM_SIZES.index(max(ITEM_SIZES[0], torch.finfo(tensor.dtype).bits // 8))


def _device(vectors: Mapping[str, torch.Tensor]) -> torch.device:
    return next(iter(vectors.values())).device if vectors else torch.device("cpu")


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor
