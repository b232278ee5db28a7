"""Ways to use the ranks of a node: which of them, and which hold one network together."""

from collections.abc import Iterator, Sequence

Formation = tuple[tuple[int, ...], ...]  # the replicas: ranks that hold one network together


def formations(ranks: Sequence[int], *, cut: bool = True) -> Iterator[Formation]:
    """Returns ways to use ranks that are given fastest first: simple ones first, then those with networks cut.

    Every rank for itself, the slowest ones left out one after another, or one of them alone; then networks held by
    two, three, ... ranks together.

    >>> list(formations([0, 1]))
    [((0,), (1,)), ((0,),), ((1,),), ((0, 1),)]
    """
    seen: set[Formation] = set()
    for size in range(1, len(ranks) + 1 if cut else 2):
        for chosen in _subsets(ranks):
            if len(chosen) % size == 0:
                formed = _grouped(chosen, size)
                if formed not in seen:
                    seen.add(formed)
                    yield formed


def _subsets(ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Returns prefixes, and all but one, of the ranks."""
    for count in range(len(ranks), 0, -1):
        yield tuple(ranks[:count])
    for left_out in range(len(ranks) - 1):
        yield tuple(rank for place, rank in enumerate(ranks) if place != left_out)


def _grouped(ranks: Sequence[int], size: int) -> Formation:
    """Returns groups of alike strength: the fastest with the slowest, to and fro."""
    count = len(ranks) // size
    groups: list[list[int]] = [[] for _ in range(count)]
    for place, rank in enumerate(ranks):
        turn, index = divmod(place, count)
        groups[index if turn % 2 == 0 else count - 1 - index].append(rank)
    return tuple(tuple(group) for group in groups)
