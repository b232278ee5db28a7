"""Which part of a tensor is sent between which ranks, when replicas are cut in different ways.

Tensors have their full shape here; a network that is not cut is a set of flat vectors that every rank holds whole.
Every replica has one owner for each element: the rank that holds it or, where all ranks do, the one it is assigned to.
The borders of all replicas cut the tensor into index blocks, each with one owner in every participant of a reduction.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from evenly.comm.blocks.replicas import ReplicaRanks, Shape, TensorCut

IndexBlock = tuple[tuple[int, int], ...]  # the range of indices of each dim
Where = tuple[slice, ...]  # a block in a rank's local coordinates


@dataclass(frozen=True)
class IndexRange:
    """Indices [start, stop) of a dim: the position of their owner, and where they begin in the owner's part."""

    start: int
    stop: int
    position: int
    offset: int = 0


class Holding:
    """One tensor in one replica."""

    def __init__(self, shape: Shape, form: TensorCut, ranks: Sequence[int]) -> None:
        self.is_cut = form.dim is not None
        self.dim = longest(shape) if form.dim is None else form.dim
        self.ranks = tuple(ranks)
        segments = _slices(shape[self.dim], len(ranks)) if form.dim is None else form.segments
        self.ranges = sorted(_index_ranges(segments), key=lambda index_range: index_range.start)
        self._starts = [index_range.start for index_range in self.ranges]

    def owner(self, block: IndexBlock) -> int:
        """Returns the rank that owns a block."""
        return self.ranks[self._range_of(block).position]

    def holders(self, block: IndexBlock) -> tuple[int, ...]:
        """Returns the ranks that hold a block."""
        return (self.owner(block),) if self.is_cut else self.ranks

    def where(self, block: IndexBlock) -> Where:
        """Returns a block in the local coordinates of a rank that holds it."""
        ranges = list(block)
        if self.is_cut:
            index_range, (start, stop) = self._range_of(block), block[self.dim]
            shift = index_range.offset - index_range.start
            ranges[self.dim] = (start + shift, stop + shift)
        return tuple(slice(start, stop) for start, stop in ranges)

    def _range_of(self, block: IndexBlock) -> IndexRange:
        return self.ranges[bisect_right(self._starts, block[self.dim][0]) - 1]


class ParticipantTensor:
    """One tensor in one participant of a reduction: in one replica, or in all replicas of a node.

    Every replica of a node owns a portion of each part, in proportion to its number of ranks.
    """

    def __init__(self, shape: Shape, name: str, replicas: Sequence[ReplicaRanks]) -> None:
        self.holdings = [Holding(shape, replica.forms[name], replica.ranks) for replica in replicas]
        self._dim = longest(shape)
        edges = {0, shape[self._dim], *(e for h in self.holdings if h.dim == self._dim for e in _edges(h.ranges))}
        sizes = [len(replica.ranks) for replica in replicas]
        self._portions = [portion for start, stop in pairwise(sorted(edges)) for portion in _divide(start, stop, sizes)]
        self._starts = [portion.start for portion in self._portions]

    def borders(self) -> Iterator[tuple[int, int]]:
        """Yields dims and the indices at which owners change."""
        for holding in self.holdings:
            yield from ((holding.dim, edge) for edge in _edges(holding.ranges))
        yield from ((self._dim, edge) for edge in _edges(self._portions))

    def owner(self, block: IndexBlock) -> int:
        """Returns the rank that owns a block in this participant."""
        portion = self._portions[bisect_right(self._starts, block[self._dim][0]) - 1]
        return self.holdings[portion.position].owner(block)

    def holders(self, block: IndexBlock) -> tuple[int, ...]:
        """Returns all ranks of this participant that hold a block, in the order of its replicas."""
        return tuple(rank for holding in self.holdings for rank in holding.holders(block))

    def where(self, block: IndexBlock, rank: int) -> Where:
        """Returns a block in the local coordinates of a rank that holds it."""
        return next(holding for holding in self.holdings if rank in holding.ranks).where(block)


def index_blocks(shape: Shape, participants: Sequence[ParticipantTensor]) -> list[IndexBlock]:
    """Returns the parts of the common refinement; none of them is empty."""
    edges = [{0, size} for size in shape]
    for participant in participants:
        for dim, edge in participant.borders():
            edges[dim].add(edge)
    return list(product(*(list(pairwise(sorted(dim_edges))) for dim_edges in edges)))


def longest(shape: Shape) -> int:
    """Returns the dim with the most indices."""
    return max(range(len(shape)), key=lambda dim: shape[dim])


def _index_ranges(segments: Sequence[Sequence[tuple[int, int]]]) -> Iterator[IndexRange]:
    for position, ranges in enumerate(segments):
        offset = 0
        for start, stop in ranges:
            if start < stop:
                yield IndexRange(start, stop, position, offset)
            offset += stop - start


def _edges(ranges: Sequence[IndexRange]) -> Iterator[int]:
    for index_range in ranges:
        yield from (index_range.start, index_range.stop)


def _slices(size: int, count: int) -> list[list[tuple[int, int]]]:
    return [[(size * position // count, size * (position + 1) // count)] for position in range(count)]


def _divide(start: int, stop: int, sizes: Sequence[int]) -> Iterator[IndexRange]:
    """Yields [start, stop) divided in proportion to `sizes`."""
    total, below = sum(sizes), 0
    for position, size in enumerate(sizes):
        low, high = (start + (stop - start) * part // total for part in (below, below + size))
        below += size
        if low < high:
            yield IndexRange(low, high, position)
