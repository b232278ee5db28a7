"""Units dealt out so that the last device finishes as early as can be: compared with every other way to do it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenly.errors import SpecError
from evenly.planner import balance
from evenly.planner.balance import _steadily

TIMES = st.integers(1, 20)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[list[int]], list[int] | None]:
    """Draws units, for every device a table of times, and what each can hold."""
    devices, units = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    tables = [[0, *draw(st.lists(TIMES, min_size=units, max_size=units))] for _ in range(devices)]
    limits = draw(st.none() | st.lists(st.integers(0, units), min_size=devices, max_size=devices))
    return units, tables, limits


def lasts(tables: list[list[int]], counts: tuple[int, ...]) -> int:
    return max(table[count] for table, count in zip(tables, counts, strict=True))


@given(cases())
@settings(max_examples=300, deadline=None)
def test_no_other_way_ends_earlier(case):
    units, tables, limits = case
    tops = limits or [units] * len(tables)
    ways = [way for way in itertools.product(*(range(top + 1) for top in tops)) if sum(way) == units]
    seconds = [table.__getitem__ for table in tables]
    if not ways:
        with pytest.raises(SpecError, match="too few"):
            balance(units, seconds, limits)
        return
    counts = balance(units, seconds, limits)
    assert sum(counts) == units
    assert all(count <= top for count, top in zip(counts, tops, strict=True))
    assert lasts(tables, counts) == min(lasts(tables, way) for way in ways)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_the_way_for_large_tables_is_as_good_where_times_grow(case):
    units, tables, limits = case
    tops = limits or [units] * len(tables)
    growing = [sorted(table) for table in tables]
    seconds = [table.__getitem__ for table in growing]
    if sum(tops) < units:
        return
    assert sum(_steadily(units, seconds, tops)) == units
    assert lasts(growing, _steadily(units, seconds, tops)) == lasts(growing, balance(units, seconds, tops))


@pytest.mark.parametrize(("units", "devices"), [(480, 3), (4096, 8), (1000, 16)])
def test_a_solver_finds_nothing_better(units, devices):
    highspy = pytest.importorskip("highspy")
    slopes = [1.0 + 0.37 * ((7 * rank) % devices) for rank in range(devices)]
    fixed = [3.0 * ((5 * rank) % 4) for rank in range(devices)]
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    end = model.addVariable(lb=0)
    counts = [model.addIntegral(lb=0, ub=units) for _ in range(devices)]
    takes = [model.addBinary() for _ in range(devices)]
    model.addConstr(sum(counts) == units)
    for count, take, slope, start in zip(counts, takes, slopes, fixed, strict=True):
        model.addConstr(count <= units * take)
        model.addConstr(slope * count + start * take <= end)
    model.setOptionValue("mip_rel_gap", 0.0)
    model.minimize(end)
    best = model.getObjectiveValue()
    seconds = [lambda c, s=slope, f=start: s * c + f for slope, start in zip(slopes, fixed, strict=True)]
    found = balance(units, seconds)
    assert max(t(c) for t, c in zip(seconds, found, strict=True) if c) == pytest.approx(best, rel=1e-6)


def published_rounding(filters: int, shares: list[float]) -> list[int]:
    """Every share rounded; what is missing or too much goes to the fastest device."""
    counts = [round(filters * share / sum(shares)) for share in shares]
    counts[shares.index(max(shares))] += filters - sum(counts)
    return counts


@given(st.integers(3, 512), st.lists(st.integers(1, 100), min_size=2, max_size=6), st.floats(0, 5))
@settings(max_examples=200, deadline=None)
def test_never_slower_than_the_published_rounding(filters, speeds, fixed):
    seconds = [lambda c, s=speed: fixed + c / s for speed in speeds]
    theirs = published_rounding(filters, [float(speed) for speed in speeds])
    if min(theirs) < 0:
        return
    ours = balance(filters, seconds)
    assert max(t(c) for t, c in zip(seconds, ours, strict=True) if c) <= max(
        t(c) for t, c in zip(seconds, theirs, strict=True) if c
    )
