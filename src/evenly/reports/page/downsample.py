"""Fewer points that show the same: lines keep their extremes, rows of a timeline are merged."""

import math

import numpy as np
import numpy.typing as npt

from evenly.reports.rank_times import Numbers, RankTimes

Indices = npt.NDArray[np.int64]
MOST_WHOLE = 2**53 - 1


def kept_points(values: Numbers, *, most: int) -> Indices:
    """Returns the indices of at most `most` points of a line: first, last, lowest and highest of each stretch.

    >>> kept_points(np.array([0.0, 0.0, 9.0, 0.0, 0.0, 0.0, -9.0, 0.0, 0.0, 0.0]), most=8).tolist()
    [0, 2, 4, 5, 6, 9]
    """
    if len(values) <= most:
        return np.arange(len(values))
    kept: set[int] = set()
    for stretch in np.array_split(np.arange(len(values)), max(1, most // 4)):
        kept |= {int(stretch[0]), int(stretch[-1])}
        finite = stretch[np.isfinite(values[stretch])]
        if len(finite):
            kept |= {int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])}
    return np.array(sorted(kept), dtype=np.int64)


def merged_rows(times: RankTimes, *, most: int) -> Indices:
    """Returns where merged rows begin, at most about `most`: half of them are dealt by number, half by time.

    Rows of a long run grow with its time, so that dealing by time alone would lose its beginning.
    """
    count, total_s = len(times), float(times.seconds.sum())
    if count <= most:
        return np.arange(count)
    weights = 0.5 / count + (0.5 * times.seconds / total_s if total_s else 0.5 / count)
    bins = whole_numbers(np.clip(np.cumsum(weights) * most, 0, most - 1), to_nearest=False)
    return np.flatnonzero(np.diff(bins, prepend=-1))


def whole_numbers(values: Numbers, *, to_nearest: bool = True) -> Indices:
    """Returns whole numbers that JavaScript can hold: damaged files have others, which become the nearest of these.

    >>> whole_numbers(np.array([1.7, -1e35, float("nan")])).tolist()
    [2, -9007199254740991, 0]
    """
    held = np.clip(np.nan_to_num(values), -MOST_WHOLE, MOST_WHOLE)
    return (np.rint(held) if to_nearest else np.floor(held)).astype(np.int64)


def rounded(values: Numbers, *, digits: int = 5) -> list[float | None]:
    """Returns numbers for JSON with few digits; None where they are not finite.

    >>> rounded(np.array([1.0, 123456.789, float("nan"), 0.000123456789]))
    [1, 123460, None, 0.00012346]
    """
    return [_short(float(value), digits) for value in values]


def _short(value: float, digits: int) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
