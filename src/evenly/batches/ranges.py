"""Sets of positions as sorted, disjoint ranges."""

from collections.abc import Iterable

Range = tuple[int, int]  # from the first position to the one after the last
Ranges = tuple[Range, ...]  # sorted, not empty, with gaps in between


def union(*sets: Iterable[Range]) -> Ranges:
    """Returns the positions that are in any of the sets.

    >>> union([(4, 6), (0, 2)], [(2, 3), (5, 9)])
    ((0, 3), (4, 9))
    """
    merged: list[Range] = []
    for start, stop in sorted(piece for pieces in sets for piece in pieces):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        elif start < stop:
            merged.append((start, stop))
    return tuple(merged)


def common(ranges: Ranges, others: Ranges) -> Ranges:
    """Returns the positions that are in both.

    >>> common(((0, 3), (5, 9)), ((2, 6), (8, 12)))
    ((2, 3), (5, 6), (8, 9))
    """
    both: list[Range] = []
    index = other = 0
    while index < len(ranges) and other < len(others):
        start, stop = max(ranges[index][0], others[other][0]), min(ranges[index][1], others[other][1])
        if start < stop:
            both.append((start, stop))
        if ranges[index][1] < others[other][1]:
            index += 1
        else:
            other += 1
    return tuple(both)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Returns the positions of `ranges` that are not in `others`.

    >>> without(((0, 5), (7, 9)), ((1, 2), (4, 8)))
    ((0, 1), (2, 4), (8, 9))
    """
    if not ranges or not others:
        return ranges
    gaps, start = [], 0
    for begin, end in others:
        gaps.append((start, begin))
        start = end
    gaps.append((start, max(start, ranges[-1][1])))
    return common(ranges, tuple(gap for gap in gaps if gap[0] < gap[1]))


def size_of(ranges: Ranges) -> int:
    """Returns the number of positions.

    >>> size_of(((0, 3), (5, 9)))
    7
    """
    return sum(stop - start for start, stop in ranges)


def split(ranges: Ranges, count: int, *, pieces: int | None = None) -> tuple[Ranges, Ranges]:
    """Returns the first `count` positions, or fewer, and the others; the first ones in at most so many pieces.

    >>> split(((0, 3), (5, 9), (10, 12)), 5), split(((0, 3), (5, 9)), 5, pieces=1)
    ((((0, 3), (5, 7)), ((7, 9), (10, 12))), (((0, 3),), ((5, 9),)))
    """
    first: list[Range] = []
    for index, (start, stop) in enumerate(ranges):
        if count <= 0 or (pieces is not None and index == pieces):
            return tuple(first), ranges[index:]
        cut = min(stop, start + count)
        first.append((start, cut))
        count -= cut - start
        if cut < stop:
            return tuple(first), ((cut, stop), *ranges[index + 1 :])
    return tuple(first), ()


def encoded(ranges: Ranges) -> list[int]:
    """Returns the ranges as a short list: gap and length of each.

    >>> encoded(((1000, 1003), (1005, 1009)))
    [1000, 3, 2, 4]
    """
    numbers, end = list[int](), 0
    for start, stop in ranges:
        numbers += [start - end, stop - start]
        end = stop
    return numbers


def decoded(numbers: object) -> Ranges:
    """Returns what `encoded` has coded; raises `ValueError` for anything else.

    >>> decoded([1000, 3, 2, 4])
    ((1000, 1003), (1005, 1009))
    """
    if not isinstance(numbers, list) or len(numbers) % 2 or not all(type(number) is int for number in numbers):
        raise ValueError("not a list of pairs of whole numbers")
    ranges, end = list[Range](), 0
    for index in range(0, len(numbers), 2):
        gap, length = numbers[index : index + 2]
        if gap < (index > 0) or length < 1:
            raise ValueError("gaps and lengths must be positive")
        ranges.append((end + gap, end + gap + length))
        end += gap + length
    return tuple(ranges)
