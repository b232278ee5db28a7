"""Cuts of a dim, and how they follow a reshape. A cut consists of units, so that heads or groups stay whole."""

from collections.abc import Iterable, Sequence
from math import lcm, prod

from evenly.spec.layout import Cut, Segments, deal, ranges

Parts = tuple[tuple[int, int], ...]  # (size, unit) of consecutive parts of a dim, each cut by itself
MOST_RANGES = 4096


class DimCuts:
    """The table of cuts of one layout; equal cuts have the same number."""

    def __init__(self, shares: Sequence[float], *, batch: int = 0) -> None:
        self.shares = list(shares)
        self.batch = batch  # samples of the example; 0: the batch is not cut
        self.table: list[Cut] = []
        self._dealt: dict[tuple[Parts, tuple[float, ...]], int] = {}
        self._numbers: dict[tuple[int, tuple[Segments, ...], int], int] = {}

    def add(self, size: int, segments: Iterable[Iterable[tuple[int, int]]], rows: int = 0) -> int:
        """Returns the number of this cut; a new cut is added to the table."""
        merged_segments = tuple(_merged(part) for part in segments)
        key = (size, merged_segments, rows)
        if key not in self._numbers:
            self._numbers[key] = len(self.table)
            self.table.append(Cut(size=size, segments=merged_segments, rows=rows))
        return self._numbers[key]

    def of_parts(self, parts: Parts, shares: Sequence[float] | None = None) -> int:
        """Returns the cut that distributes every part over the ranks in its units."""
        key = (parts, tuple(shares or ()))
        if key in self._dealt:
            return self._dealt[key]
        lists: list[list[tuple[int, int]]] = [[] for _ in self.shares]
        start = 0
        for size, unit in parts:
            for part, piece in zip(lists, ranges(deal(size // unit, list(shares or self.shares))), strict=True):
                part += [(start + a * unit, start + b * unit) for a, b in piece]
            start += size
        self._dealt[key] = self.add(start, lists)
        return self._dealt[key]

    def of_batch(self, rows: int = 1) -> int:
        """Returns the cut of the batch with `rows` rows per sample."""
        dealt = ranges(deal(self.batch, self.shares))
        return self.add(self.batch * rows, [[(a * rows, b * rows) for a, b in part] for part in dealt], rows)

    def scaled(self, number: int, up: int = 1, down: int = 1) -> int | None:
        """Returns the cut with every index replaced by up / down indices; None if an edge is not whole."""
        cut = self.table[number]
        edges = [edge for part in cut.segments for segment in part for edge in segment]
        if any(edge * up % down for edge in [cut.size, cut.rows, *edges]):
            return None
        parts = [[(a * up // down, b * up // down) for a, b in part] for part in cut.segments]
        return self.add(cut.size * up // down, parts, cut.rows * up // down)

    def narrowed(self, number: int, start: int, stop: int) -> int | None:
        """Returns the cut of the indices [start, stop)."""
        cut = self.table[number]
        if cut.rows:
            return None
        parts = [[(max(a, start) - start, min(b, stop) - start) for a, b in part] for part in cut.segments]
        return self.add(stop - start, [[(a, b) for a, b in part if b > a] for part in parts])

    def joined(self, numbers: Sequence[int]) -> int | None:
        """Returns the cut of concatenated dims."""
        if any(self.table[number].rows for number in numbers):
            return None
        lists: list[list[tuple[int, int]]] = [[] for _ in self.shares]
        start = 0
        for number in numbers:
            for part, piece in zip(lists, self.table[number].segments, strict=True):
                part += [(start + a, start + b) for a, b in piece]
            start += self.table[number].size
        return self.add(start, lists)

    def viewed(self, before: Sequence[int], after: Sequence[int], dim: int, number: int) -> tuple[int, int] | None:
        """Returns the dim and cut of a tensor of shape `before`, cut along `dim`, viewed as shape `after`."""
        group = next((g for g in matched(before, after) or [] if dim in g[0]), None)
        if group is None:
            return None
        cut = self.table[number]
        outer = prod(before[d] for d in group[0] if d < dim)
        inner = prod(before[d] for d in group[0] if d > dim)
        if cut.rows or outer * len(cut.segments) > MOST_RANGES:
            return self._viewed_batch(after, group[1], number, outer, inner)
        flat = [_spread(part, outer, cut.size, inner) for part in cut.segments]
        for target in sorted(group[1], key=lambda d: after[d] == 1):
            span = after[target]
            outer_out = prod(after[d] for d in group[1] if d < target)
            inner_out = prod(after[d] for d in group[1] if d > target)
            periodic_parts = [_periodic(part, outer_out, span, inner_out) for part in flat]
            if all(part is not None for part in periodic_parts):
                return target, self.add(span, [part or () for part in periodic_parts])
        return None

    def _viewed_batch(
        self, after: Sequence[int], dims: Sequence[int], number: int, outer: int, inner: int
    ) -> tuple[int, int] | None:
        target = next((d for d in dims if after[d] > 1), None)
        if outer > 1 or target is None:
            return None
        scaled = self.scaled(number, inner, prod(after[d] for d in dims if d > target))
        return None if scaled is None or self.table[scaled].size != after[target] else (target, scaled)


def matched(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]] | None:
    """Returns the groups of dims that hold the same elements in both shapes.

    >>> matched((2, 12, 5), (2, 3, 4, 5))
    [(range(0, 1), range(0, 1)), (range(1, 2), range(1, 3)), (range(2, 3), range(3, 4))]
    """
    if prod(before) != prod(after) or not prod(before):
        return None
    groups, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        first_i, first_j, size_before, size_after = i, j, before[i], after[j]
        i, j = i + 1, j + 1
        while size_before != size_after:
            if size_before < size_after:
                size_before, i = size_before * before[i], i + 1
            else:
                size_after, j = size_after * after[j], j + 1
        groups.append((range(first_i, i), range(first_j, j)))
    if groups and (i < len(before) or j < len(after)):  # trailing dims of size 1
        first_i, first_j = groups[-1][0].start, groups[-1][1].start
        groups[-1] = (range(first_i, len(before)), range(first_j, len(after)))
    return groups


def _merged(part: Iterable[tuple[int, int]]) -> Segments:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(part):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif stop > start:
            merged.append((start, stop))
    return tuple(merged)


def _spread(part: Segments, outer: int, size: int, inner: int) -> Segments:
    return _merged(((o * size + a) * inner, (o * size + b) * inner) for o in range(outer) for a, b in part)


def _periodic(flat: Segments, outer: int, span: int, inner: int) -> Segments | None:
    """Returns the ranges of a dim of `span` which, repeated `outer` times with `inner` elements each, give `flat`."""
    block = [(max(a, 0), min(b, span * inner)) for a, b in flat if a < span * inner]
    if any(edge % inner for segment in block for edge in segment):
        return None
    part = _merged((a // inner, b // inner) for a, b in block)
    return part if _spread(part, outer, span, inner) == flat else None


def refined(first: Parts | None, second: Parts | None) -> Parts | None:
    """Returns parts that satisfy both preferences, or the first one if they do not fit together."""
    if first is None or second is None or first == second:
        return first if second is None else second
    one, many = sorted((first, second), key=len)
    if len(one) == 1:
        one = tuple((size, one[0][1]) for size, _ in many)
    if [size for size, _ in one] != [size for size, _ in many]:
        return first
    joined = tuple((size, lcm(a, b)) for (size, a), (_, b) in zip(one, many, strict=True))
    return joined if all(size % unit == 0 for size, unit in joined) else first
