"""Groupings of the ranks of a node: which ranks are used, and which of them hold one network together."""

from collections.abc import Iterator, Sequence

Grouping = tuple[tuple[int, ...], ...]  # the replicas: ranks that hold one network together
MANY = 16  # ranks of a node; for more, fewer groupings are tried


def groupings(ranks: Sequence[int], *, cut: bool = True) -> Iterator[Grouping]:
    """Yields groupings of ranks that are ordered fastest first: whole networks first, then cut ones.

    First every rank holds a whole network, with the slowest left out one after another, or one rank left out; then
    two, three, ... ranks hold one network together. Of many ranks, a network is cut over
    the fastest `size` of them, or over all in groups of `size`.

    >>> list(groupings([0, 1]))
    [((0,), (1,)), ((0,),), ((1,),), ((0, 1),)]
    """
    yielded: set[Grouping] = set()
    for size in _sizes(len(ranks)) if cut else [1]:
        num_grouped = len(ranks) - len(ranks) % size
        few_subsets = [tuple(ranks[:num_grouped]), tuple(ranks[:size])]
        for chosen in _subsets(ranks) if size == 1 or len(ranks) <= MANY else few_subsets:
            if len(chosen) % size == 0:
                grouping = _grouped(chosen, size)
                if grouping not in yielded:
                    yielded.add(grouping)
                    yield grouping


def _sizes(count: int) -> list[int]:
    """Returns how many ranks may hold one network together.

    >>> _sizes(3), _sizes(70)[-4:]
    ([1, 2, 3], [16, 32, 64, 70])
    """
    large = [MANY << power for power in range(1, count.bit_length()) if MANY << power < count]
    return sorted({*range(1, min(count, MANY) + 1), *large, count})


def _subsets(ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields the prefixes of the ranks, and the ranks without one of them."""
    for count in range(len(ranks), 0, -1):
        yield tuple(ranks[:count])
    for left_out in range(len(ranks) - 1):
        yield tuple(rank for position, rank in enumerate(ranks) if position != left_out)


def _grouped(ranks: Sequence[int], size: int) -> Grouping:
    """Returns groups of similar speed: ranks are distributed in alternating direction, fastest first."""
    count = len(ranks) // size
    groups: list[list[int]] = [[] for _ in range(count)]
    for position, rank in enumerate(ranks):
        turn, index = divmod(position, count)
        groups[index if turn % 2 == 0 else count - 1 - index].append(rank)
    return tuple(tuple(group) for group in groups)
