"""Networks nobody has thought of: cut over ranks they are as on one device, or refused by name on all ranks."""

from functools import partial

import pytest

from tests.shards.playing import play
from tests.shards.strange_networks import batch, network, story

FEW, MANY = 12, 400


def check(seed: int) -> str:
    """Returns what was refused about the network of this seed; "" if nothing was."""
    shares, cut_batch, acts = story(seed)
    return play(partial(network, seed), batch(4), shares, acts, cut_batch=cut_batch)


@pytest.mark.parametrize("seed", range(FEW))
def test_a_strange_network_is_exact_or_refused(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(FEW, MANY, 24))
def test_many_strange_networks_are_exact_or_refused(first: int) -> None:
    said = [check(seed) for seed in range(first, first + 24)]
    assert sum(not refused for refused in said) > 3  # not all is refused
