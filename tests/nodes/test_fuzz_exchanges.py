"""Random runs with any form of exchange end as a single process that plays all ranks ends, or are refused on all."""

import pytest

from tests.nodes.exchange_fuzz import judge, make

QUICK = (5, 25, 34, 38, 83, 128, 140, 142, 201)  # each was wrong once
MORE = range(1000, 1160)


@pytest.mark.parametrize("seed", QUICK)
def test_a_random_run(seed):
    assert judge(make(seed)) in ("equal", "refused")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(MORE.start, MORE.stop, 20))
def test_twenty_random_runs(first):
    ends = {seed: judge(make(seed)) for seed in range(first, first + 20)}
    assert {seed: end for seed, end in ends.items() if end not in ("equal", "refused")} == {}
