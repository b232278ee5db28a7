"""Who owns which part of a flat vector when nodes have unequal numbers of ranks.

Rank l of a node with n ranks owns the fraction [l/n, (l+1)/n) of the vector. The common refinement of all nodes'
borders gives segments; each has one owner in every node, and these owners average it among themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise


@dataclass(frozen=True)
class Segment:
    """The fraction [start, stop) of a flat vector and its owner in every node."""

    start: Fraction
    stop: Fraction
    owners: tuple[int, ...]

    def range_of(self, total: int) -> tuple[int, int]:
        """Returns the first index and the end of this segment in a vector of `total` elements."""
        return int(self.start * total), int(self.stop * total)


def refine(nodes: Sequence[Sequence[int]]) -> list[Segment]:
    """Returns the segments of the common refinement; `nodes` gives the ranks of each node.

    >>> [(str(s.start), str(s.stop), s.owners) for s in refine([[0, 1], [2]])]
    [('0', '1/2', (0, 2)), ('1/2', '1', (1, 2))]
    """
    borders = sorted({Fraction(local, len(ranks)) for ranks in nodes for local in range(len(ranks) + 1)})
    return [
        Segment(start, stop, tuple(ranks[int(start * len(ranks))] for ranks in nodes))
        for start, stop in pairwise(borders)
    ]


def slices(ranks: Sequence[int], total: int) -> list[tuple[int, int]]:
    """Returns the range that each rank of one node owns.

    >>> slices([4, 5, 6], 10)
    [(0, 3), (3, 6), (6, 10)]
    """
    count = len(ranks)
    return [(total * local // count, total * (local + 1) // count) for local in range(count)]
