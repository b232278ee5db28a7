"""Which cut network is worth trying before a plan is made."""

import pytest

from evenly.planner import cut_to_try
from evenly.spec import Profile
from tests.planner.test_plan import cluster_of, heavy

__all__ = ["heavy"]


@pytest.mark.parametrize(("part", "is_tried"), [(0.7, True), (0.05, False)])
def test_the_cut_that_memory_forces_is_tried_but_none_for_which_there_is_none(heavy, part, is_tried):
    whole = 4 * heavy.parameter_bytes + 8 * heavy.sample_bytes
    profile = Profile.from_speeds(cluster_of(2, memory=int(part * whole)), heavy, [1.0, 1.0])
    replica_option = cut_to_try([0, 1], profile, heavy)
    assert (replica_option is not None) == is_tried
    if replica_option is not None:
        assert replica_option.most_samples([device.free_bytes for device in profile.devices]) >= 8
