"""Whether ranks hold the same parameters: a few numbers for all of them, compared before anything is exchanged.

A fingerprint is a weighted sum of all elements, f = sum_i w_i x_i, with fixed weights that look random. Beside it goes
the rounding unit of the sum, u = eps ||x||: ranks on unlike devices round differently in each step, which is no
divergence. Tensors of unlike precision have sums of their own: what rounding changes in bfloat16 would hide all else.
"""

import hashlib
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from evenly.comm import LocalShard
from evenly.exchange.tensors.flat import real

COLUMNS = 512
LARGE = 2**18  # elements; smaller tensors are put together first, as many small operations take longer
ITEM_SIZES = (2, 4, 8)  # bytes of an element: the precisions with sums of their own; smaller ones count as 2
ROOM = 16.0  # rounding units that may lie between ranks after one step; it grows with the root of the steps
ROOM_ALIKE = 64.0  # between ranks on devices of one kind: rounding units of a single element of average size
SALT = 790  # one of those with which sums over 16 to 512 equal elements are as large as of random ones
UNLIKE = math.nan  # equal to nothing


@dataclass(frozen=True)
class FingerprintValues:
    """The fingerprint of a network in numbers that travel: a sum and its rounding unit for each precision."""

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
    rows: int  # how many of the sums are its own
    elements: int
    eps: float
    precision: int  # place in ITEM_SIZES


class Fingerprint:
    """Weighted sums over parts of tensors, taken when it is made; nothing is read from their device until asked for."""

    def __init__(self, pieces: Sequence[_Piece], weighted: torch.Tensor, code: float) -> None:
        self._pieces = pieces  # in the order of their precision
        self._weighted = weighted  # sums of rows, times the weights of the rows: [rows], float64
        self._platform = code
        self._precisions = sorted({piece.precision for piece in pieces})
        totals = []
        rows = [sum(piece.rows for piece in pieces if piece.precision == own) for own in self._precisions]
        for own, part in zip(self._precisions, torch.split(weighted, rows), strict=True):
            eps = max(piece.eps for piece in pieces if piece.precision == own)
            totals += [part.sum(), torch.linalg.vector_norm(part) * eps]
        self._totals = torch.stack(totals) if totals else weighted

    @property
    def elements(self) -> list[int]:
        """How many elements of each precision there are."""
        return [sum(p.elements for p in self._pieces if p.precision == own) for own in range(len(ITEM_SIZES))]

    def read(self) -> FingerprintValues:
        """Returns the fingerprint in numbers."""
        numbers = self._totals.tolist()
        values, units = list(NO_FINGERPRINT.values), list(NO_FINGERPRINT.units)
        for place, precision in enumerate(self._precisions):
            values[precision], units[precision] = numbers[2 * place], numbers[2 * place + 1]
        return FingerprintValues(tuple(values), tuple(units), self._platform)

    def by_tensor(self) -> list[tuple[str, float, float, int]]:
        """Returns name, fingerprint, rounding unit and elements of each tensor."""
        parts = torch.split(self._weighted.cpu(), [piece.rows for piece in self._pieces])
        return [
            (piece.name, float(part.sum()), float(torch.linalg.vector_norm(part)) * piece.eps, piece.elements)
            for piece, part in zip(self._pieces, parts, strict=True)
        ]


@torch.no_grad()
def fingerprint(tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    """Returns the fingerprint of tensors that lie alike on all ranks."""
    vectors = {name: real(tensor).reshape(-1) for name, tensor in tensors.items() if tensor.numel()}
    pieces, sums = [], [torch.zeros(0, dtype=torch.float64, device=_device(vectors))]
    for precision in range(len(ITEM_SIZES)):
        for dtype in sorted({v.dtype for v in vectors.values() if _precision(v) == precision}, key=str):
            own = {name: vector for name, vector in vectors.items() if vector.dtype == dtype}
            small = {name: vector for name, vector in own.items() if vector.numel() < LARGE}
            if small:
                padding = torch.zeros(COLUMNS, dtype=dtype, device=sums[0].device)
                sums.append(
                    _row_sums(torch.cat([t for v in small.values() for t in (v, padding[: -len(v) % COLUMNS])]))
                )
                pieces += [_piece(name, vector, -(-len(vector) // COLUMNS)) for name, vector in small.items()]
            for name, vector in own.items():
                if vector.numel() >= LARGE:
                    sums.append(_row_sums(vector))
                    pieces.append(_piece(name, vector, len(sums[-1])))
    all_sums = torch.cat(sums)  # [rows]
    weighted = all_sums * _row_weights(len(all_sums), all_sums.device)
    return Fingerprint(pieces, weighted, _platform_code(all_sums.device, torch.get_num_threads()))


@torch.no_grad()
def placed_fingerprint(pairs: Mapping[str, tuple[torch.Tensor, LocalShard | None]], *, speaks: bool) -> Fingerprint:
    """Returns this rank's part of the fingerprint of a network that is cut over ranks; the parts are summed.

    Weights belong to global indices, so that replicas may be cut in different ways. Of a tensor that all ranks of the
    network hold the one that `speaks` counts it.
    """
    pieces, sums, places = [], [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.int64)]
    numbered = list(enumerate(pairs.items()))
    for number, (name, (tensor, placement)) in sorted(numbered, key=lambda item: _precision(item[1][1][0])):
        own_sums, own_places = _placed(tensor, placement, speaks=speaks)
        pieces.append(_piece(name, tensor, len(own_sums)))
        sums.append(own_sums.cpu())
        places.append(own_places.cpu() + 1001 * number)
    weighted = torch.cat(sums) * _weights(torch.cat(places) + 7919)
    return Fingerprint(pieces, weighted, UNLIKE)  # replicas are summed in different orders


def apart(values: Sequence[float], units: Sequence[float], *, steps: int, alike: int = 0) -> list[int]:
    """Returns the places of `values` that lie further from the first than rounding in `steps` explains.

    `alike` are the elements behind a value if all ranks compute on devices of one kind, where rounding is the same.
    """
    room = ROOM_ALIKE / math.sqrt(alike) if alike else math.inf
    room = min(room, ROOM * math.sqrt(1 + steps))
    found = []
    for place, (value, unit) in enumerate(zip(values, units, strict=True)):
        both_undefined = not math.isfinite(value) and not math.isfinite(values[0])
        if not both_undefined and not abs(value - values[0]) <= room * max(unit, units[0]):
            found.append(place)
    return found


def are_apart(rows: Sequence[FingerprintValues], elements: Sequence[int], *, steps: int) -> bool:
    """Returns whether networks differ by more than rounding in `steps` explains; they have so many `elements`."""
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


def _placed(tensor: torch.Tensor, placement: LocalShard | None, *, speaks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weighted sums for each index of the first dim, and these indices in the full tensor."""
    cut = placement.dim if placement is not None else None
    if not tensor.numel() or (cut is None and not speaks):
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    values = _wide(real(tensor.detach().reshape(1) if not tensor.ndim else tensor.detach()))
    places = [torch.arange(size) for size in values.shape]
    if placement is not None and cut is not None:
        places[cut] = torch.cat([torch.arange(*segment) for segment in placement.segments[placement.shard_group.rank]])
    with torch.autocast(values.device.type, enabled=False):
        for dim in range(values.ndim - 1, 0, -1):
            values = values @ _weights(places[dim] + 104729 * dim).to(values)
    return values.double(), places[0]


def _row_sums(vector: torch.Tensor) -> torch.Tensor:
    """Returns weighted sums of rows of a vector: [rows], float64."""
    vector = _wide(vector)
    weights = _column_weights(vector.dtype, vector.device)
    whole = vector.numel() // COLUMNS * COLUMNS
    with torch.autocast(vector.device.type, enabled=False):
        sums = [vector[:whole].view(-1, COLUMNS) @ weights] if whole else []
        if rest := vector.numel() - whole:
            sums.append((vector[whole:] @ weights[:rest]).view(1))
    return torch.cat(sums).double()


def _weights(places: torch.Tensor) -> torch.Tensor:
    """Returns a number for each place, of a size between 0.5 and 1 and of either sign.

    It is a hash in integers, so the same on every device.
    """
    mixed = places.long() + SALT
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
