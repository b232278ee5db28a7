"""Random loops end as a single process that plays all ranks ends, or are refused on all ranks."""

import pytest

from tests.nodes.loop_fuzz import judge, make

QUICK, MORE = range(16), range(1000, 1200)


@pytest.mark.parametrize("seed", QUICK)
def test_a_random_loop(seed):
    assert judge(make(seed)) in ("equal", "refused")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(MORE.start, MORE.stop, 20))
def test_twenty_random_loops(first):
    ends = {seed: judge(make(seed)) for seed in range(first, first + 20)}
    assert {seed: end for seed, end in ends.items() if end not in ("equal", "refused")} == {}
