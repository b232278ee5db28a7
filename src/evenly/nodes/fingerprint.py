"""Whether ranks hold the same parameters: two numbers for all of them, compared before anything is exchanged.

A fingerprint is a weighted sum of all elements, f = sum_i w_i x_i, with fixed weights that look random, and what
rounding may change of it: ranks of unlike devices round differently in each step, and that is no divergence.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from evenly.comm import Placement
from evenly.nodes.flat import real

Held = tuple[float, float]  # a fingerprint, and the rounding unit of it

COLUMNS = 128
LARGE = 2**18  # elements; smaller tensors are put together first, as many small operations take longer
UNITS = 16.0  # of rounding after one step; it grows with the root of the steps
NOTHING_HELD: Held = (0.0, 0.0)


class Fingerprint:
    """Weighted sums over parts of tensors, taken when it is made; nothing is read from their device until asked for."""

    def __init__(self, rows: Sequence[tuple[str, int]], sums: torch.Tensor, places: torch.Tensor, unit: float) -> None:
        self._rows = rows  # names of tensors, and how many of the sums belong to each
        self._weighted = sums * _waves(3 * places + 1)
        self._unit = unit
        self._totals = torch.stack([self._weighted.sum(), torch.linalg.vector_norm(self._weighted) * unit])

    def read(self) -> Held:
        """Returns the fingerprint and its rounding unit."""
        value, unit = self._totals.tolist()
        return value, unit

    def by_tensor(self) -> list[tuple[str, float, float]]:
        """Returns name, fingerprint and rounding unit of each tensor."""
        parts = torch.split(self._weighted.cpu(), [count for _, count in self._rows])
        return [
            (name, float(part.sum()), float(torch.linalg.vector_norm(part)) * self._unit)
            for (name, _), part in zip(self._rows, parts, strict=True)
        ]


@torch.no_grad()
def fingerprint(tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    """Returns the fingerprint of tensors that lie alike on all ranks."""
    vectors = {name: vector for name, tensor in tensors.items() if (vector := _vector(tensor)).numel()}
    rows, sums = [], []
    for dtype in sorted({vector.dtype for vector in vectors.values()}, key=str):
        small = {n: v for n, v in vectors.items() if v.dtype == dtype and v.numel() < LARGE}
        if small:
            padding = torch.zeros(COLUMNS, dtype=dtype, device=next(iter(small.values())).device)
            pieces = [piece for v in small.values() for piece in (v, padding[: -v.numel() % COLUMNS])]
            sums.append(_row_sums(torch.cat(pieces)))
            rows += [(name, -(-vector.numel() // COLUMNS)) for name, vector in small.items()]
        for name, vector in vectors.items():
            if vector.dtype == dtype and vector.numel() >= LARGE:
                sums.append(_row_sums(vector))
                rows.append((name, len(sums[-1])))
    found = torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64)  # [rows]
    return Fingerprint(rows, found, torch.arange(len(found), device=found.device), _unit(tensors.values()))


@torch.no_grad()
def placed_fingerprint(pairs: Mapping[str, tuple[torch.Tensor, Placement | None]], *, speaks: bool) -> Fingerprint:
    """Returns this rank's part of the fingerprint of a network that is cut over ranks; the parts are summed.

    Weights belong to global indices, so that replicas may be cut in different ways. Of a tensor that all ranks of the
    network hold the one that `speaks` counts it.
    """
    rows, sums, places = [], [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.int64)]
    for number, (name, (tensor, placement)) in enumerate(pairs.items()):
        own_sums, own_places = _placed(tensor, placement, speaks=speaks)
        rows.append((name, len(own_sums)))
        sums.append(own_sums.cpu())
        places.append(own_places.cpu() + 1001 * number)
    unit = _unit(tensor for tensor, _ in pairs.values())
    return Fingerprint(rows, torch.cat(sums), torch.cat(places), unit)


def apart(rows: Sequence[Held], *, steps: int) -> list[int]:
    """Returns the places of `rows` that hold something else than the first, more than rounding in `steps` explains."""
    room = UNITS * math.sqrt(1 + steps)
    first, unit = rows[0]
    found = []
    for place, (value, own_unit) in enumerate(rows):
        both_undefined = not math.isfinite(value) and not math.isfinite(first)
        if not both_undefined and not abs(value - first) <= room * max(unit, own_unit):
            found.append(place)
    return found


def _placed(tensor: torch.Tensor, placement: Placement | None, *, speaks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weighted sums for each index of the first dim, and these indices in the full tensor."""
    cut = placement.dim if placement is not None else None
    if not tensor.numel() or (cut is None and not speaks):
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    values = real(_wide(tensor.detach().reshape(1) if not tensor.ndim else tensor.detach()))
    places = [torch.arange(size) for size in values.shape]
    if placement is not None and cut is not None:
        places[cut] = torch.cat([torch.arange(*segment) for segment in placement.segments[placement.wire.rank]])
    with torch.autocast(values.device.type, enabled=False):
        for dim in range(values.ndim - 1, 0, -1):
            values = values @ _waves(places[dim] * (dim + 1) + dim).to(values)
    return values.double(), places[0]


def _row_sums(vector: torch.Tensor) -> torch.Tensor:
    """Returns weighted sums of rows of a vector: [rows], float64."""
    weights = _waves(torch.arange(COLUMNS, device=vector.device)).to(vector.dtype)
    whole = vector.numel() // COLUMNS * COLUMNS
    with torch.autocast(vector.device.type, enabled=False):
        sums = [vector[:whole].view(-1, COLUMNS) @ weights] if whole else []
        if rest := vector.numel() - whole:
            sums.append((vector[whole:] @ weights[:rest]).view(1))
    return torch.cat(sums).double()


def _waves(places: torch.Tensor) -> torch.Tensor:
    """Returns a weight between -1 and 1 for each place; no two sums of places are likely to agree."""
    return torch.cos(places.double() * math.sqrt(2) + 1)


def _vector(tensor: torch.Tensor) -> torch.Tensor:
    return _wide(real(tensor).reshape(-1))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _unit(tensors: Iterable[torch.Tensor]) -> float:
    return max((torch.finfo(tensor.dtype).eps for tensor in tensors), default=0.0)
