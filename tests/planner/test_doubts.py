"""Measurements that should not be trusted say so."""

import torch
from torch import nn

from evenly import trace
from evenly.planner import doubts, plan
from evenly.spec import Curve, Profile
from tests.ranks import cluster_of, ragged


def measured(spread: float | None, sizes: tuple[int, ...]) -> tuple[Profile, list[str]]:
    cluster, graph = cluster_of(ragged(2)), trace(nn.Linear(3, 4), torch.ones(64, 3))
    profile = Profile.from_speeds(cluster, graph, [1, 1])
    step = Curve(sizes=sizes, seconds=tuple(1e-3 * size for size in sizes))
    devices = tuple(device.model_copy(update={"spread": spread, "step": step}) for device in profile.devices)
    profile = profile.model_copy(update={"devices": devices, "is_measured": True})
    return profile, doubts(profile, plan(cluster, profile, graph, batch_size=64))


def test_a_steady_measurement_of_several_sizes_is_not_doubted():
    assert measured(0.1, (8, 16, 32))[1] == []


def test_a_shaky_measurement_of_one_size_far_from_the_plan_is_doubted_three_times():
    profile, lines = measured(0.9, (2,))
    assert "lie up to 90% apart" in lines[0]
    assert "only 1 size of a step could be timed on ranks [0, 1]" in lines[1]
    told = "doubtful: rank 0 gets 32 samples and was measured with 2 at most, and 1 other rank likewise"
    assert lines[2] == told
    assert measured(0.1, (1, 2, 3))[1] == [
        "doubtful: rank 0 gets 32 samples and was measured with 3 at most, and 1 other rank likewise. Measure "
        "without --quick, or in a session with profile='thorough'"
    ]
    assert doubts(profile) == lines[:2]
    assert doubts(measured(0.1, (16, 32, 64))[0]) == doubts(measured(None, (2, 3, 4))[0]) == []
    assert doubts(profile.model_copy(update={"is_measured": False})) == []
