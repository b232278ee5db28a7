"""Which part of a tensor travels between which ranks, when replicas are cut in different ways.

A tensor is seen in its full shape; a network that is not cut is seen as flat vectors that every rank holds whole. Every
replica names one owner for each element: the rank that holds it or, where all ranks do, the one it was dealt to. The
borders of all replicas cut the tensor into boxes, each with one owner on every side of a meeting.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from evenly.comm.blocks.replicas import ReplicaRanks, Shape, TensorCut

IndexBlock = tuple[tuple[int, int], ...]  # the range of indices of each dim
Where = tuple[slice, ...]  # a box in a rank's own coordinates


@dataclass(frozen=True)
class IndexRange:
    """Indices [start, stop) of a dim: the place of their owner, and where they begin in the owner's part."""

    start: int
    stop: int
    place: int
    offset: int = 0


class Holding:
    """One tensor in one replica."""

    def __init__(self, shape: Shape, form: TensorCut, ranks: Sequence[int]) -> None:
        self.is_cut = form.dim is not None
        self.dim = longest(shape) if form.dim is None else form.dim
        self.ranks = tuple(ranks)
        segments = _slices(shape[self.dim], len(ranks)) if form.dim is None else form.segments
        self.runs = sorted(_runs(segments), key=lambda run: run.start)
        self._starts = [run.start for run in self.runs]

    def owner(self, block: IndexBlock) -> int:
        """Returns the rank that answers for a box."""
        return self.ranks[self._run(block).place]

    def holders(self, block: IndexBlock) -> tuple[int, ...]:
        """Returns the ranks that have a box."""
        return (self.owner(block),) if self.is_cut else self.ranks

    def where(self, block: IndexBlock) -> Where:
        """Returns a box in the coordinates of a rank that has it."""
        ranges = list(block)
        if self.is_cut:
            run, (start, stop) = self._run(block), block[self.dim]
            shift = run.offset - run.start
            ranges[self.dim] = (start + shift, stop + shift)
        return tuple(slice(start, stop) for start, stop in ranges)

    def _run(self, block: IndexBlock) -> IndexRange:
        return self.runs[bisect_right(self._starts, block[self.dim][0]) - 1]


class Side:
    """One tensor on one side of a meeting: in one replica, or in all replicas of a node.

    Every replica of a node speaks for a portion of each of its parts, as large as its share of the node's ranks.
    """

    def __init__(self, shape: Shape, name: str, replicas: Sequence[ReplicaRanks]) -> None:
        self.holdings = [Holding(shape, replica.forms[name], replica.ranks) for replica in replicas]
        self._dim = longest(shape)
        edges = {0, shape[self._dim], *(e for h in self.holdings if h.dim == self._dim for e in _edges(h.runs))}
        sizes = [len(replica.ranks) for replica in replicas]
        self._portions = [portion for start, stop in pairwise(sorted(edges)) for portion in _deal(start, stop, sizes)]
        self._starts = [portion.start for portion in self._portions]

    def borders(self) -> Iterator[tuple[int, int]]:
        """Yields dims and the indices at which owners change."""
        for holding in self.holdings:
            yield from ((holding.dim, edge) for edge in _edges(holding.runs))
        yield from ((self._dim, edge) for edge in _edges(self._portions))

    def owner(self, block: IndexBlock) -> int:
        """Returns the rank that speaks for this side about a box."""
        portion = self._portions[bisect_right(self._starts, block[self._dim][0]) - 1]
        return self.holdings[portion.place].owner(block)

    def holders(self, block: IndexBlock) -> tuple[int, ...]:
        """Returns all ranks of this side that have a box, in the order of its replicas."""
        return tuple(rank for holding in self.holdings for rank in holding.holders(block))

    def where(self, block: IndexBlock, rank: int) -> Where:
        """Returns a box in the coordinates of a rank that has it."""
        return next(holding for holding in self.holdings if rank in holding.ranks).where(block)


def index_blocks(shape: Shape, sides: Sequence[Side]) -> list[IndexBlock]:
    """Returns the parts of the common refinement; none of them is empty."""
    edges = [{0, size} for size in shape]
    for side in sides:
        for dim, edge in side.borders():
            edges[dim].add(edge)
    return list(product(*(list(pairwise(sorted(found))) for found in edges)))


def longest(shape: Shape) -> int:
    """Returns the dim with the most indices."""
    return max(range(len(shape)), key=lambda dim: shape[dim])


def _runs(segments: Sequence[Sequence[tuple[int, int]]]) -> Iterator[IndexRange]:
    for place, ranges in enumerate(segments):
        offset = 0
        for start, stop in ranges:
            if start < stop:
                yield IndexRange(start, stop, place, offset)
            offset += stop - start


def _edges(runs: Sequence[IndexRange]) -> Iterator[int]:
    for run in runs:
        yield from (run.start, run.stop)


def _slices(size: int, count: int) -> list[list[tuple[int, int]]]:
    return [[(size * place // count, size * (place + 1) // count)] for place in range(count)]


def _deal(start: int, stop: int, sizes: Sequence[int]) -> Iterator[IndexRange]:
    """Yields [start, stop) dealt out in proportion to `sizes`."""
    total, below = sum(sizes), 0
    for place, size in enumerate(sizes):
        low, high = (start + (stop - start) * part // total for part in (below, below + size))
        below += size
        if low < high:
            yield IndexRange(low, high, place)
