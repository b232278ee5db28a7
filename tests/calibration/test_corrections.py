"""How measured joint steps correct a profile: numbers computed by hand, without a cluster."""

import pytest

from evenly.calibration.corrections import (
    Expectation,
    Joint,
    LargeStep,
    RankSteps,
    SmallStep,
    added_by_averaging,
    alone_factor,
    correct_profile,
    large_factor,
    measured_corrections,
    small_factor,
    steps_to_make,
)
from evenly.calibration.joint_steps import STEPS
from evenly.spec import Curve, CutStep, DeviceProfile, Profile
from tests.ranks import cluster_of, ragged

FAST, SLOW = 0.1, 0.2  # seconds for each sample


def profile_of(*sample_s: float, alone: float = 1.0) -> Profile:
    """Returns devices whose steps take these seconds for each sample, from 1 to 9 of them; the example has 8."""
    devices = [
        DeviceProfile(rank=rank, step=Curve(sizes=(1, 9), seconds=(each_s, 9 * each_s)), alone=alone)
        for rank, each_s in enumerate(sample_s)
    ]
    return Profile(cluster="c", graph="g", batch_size=8, devices=tuple(devices))


def expectation(*sample_s: float, nodes: list[list[int]], alone: float = 1.0, enough_s: float = 10.0) -> Expectation:
    return Expectation(0, cluster_of(nodes), profile_of(*sample_s, alone=alone), enough_s)


@pytest.mark.parametrize(
    ("expected_s", "enough_s", "steps"),
    [(1.0, 10.0, 10), (0.01, 10.0, 40), (5.0, 6.0, 2), (7.0, 6.0, 1), (100.0, 6.0, 1)],
)
def test_as_many_steps_as_there_is_time_for(expected_s: float, enough_s: float, steps: int):
    assert steps_to_make(expected_s, enough_s) == steps


def test_a_rank_needs_less_by_itself_while_others_rest():
    expected = expectation(FAST, SLOW, nodes=ragged(2), alone=0.5)
    assert expected.own_s([0, 1], 0, 4) == pytest.approx(0.4)
    assert expected.own_s([0], 0, 4) == pytest.approx(0.2)


def test_the_fastest_rank_of_a_node_plans_for_it():
    assert expectation(SLOW, FAST, FAST, FAST / 2, nodes=[[0, 1, 2], [3]]).fastest == 1


def test_batches_by_speed():
    nodes = ragged(2, 1)
    assert expectation(FAST, SLOW, FAST, nodes=nodes).samples_by_speed([0, 1]) == [5, 3]  # of 8, at 2 to 1
    short = expectation(FAST, SLOW, FAST, nodes=nodes, enough_s=0.4)  # 8 samples take 8/15 s, two steps of 3 take 0.4 s
    assert short.samples_by_speed([0, 1]) == [2, 1]
    assert expectation(FAST, 8 * FAST, nodes=ragged(2)).samples_by_speed([0, 1]) == [7, 1]


def test_the_fastest_rank_leads_if_it_would_finish_last():
    expected = expectation(FAST, SLOW, nodes=ragged(2))
    assert expected.leader([0, 1], [5, 3]) == 0  # 0.5 s, more than twice the 0.2 s of the other with one sample
    assert expected.leader([0, 1], [4, 3]) is None
    assert expected.leader([0], [8]) is None
    assert expectation(FAST, FAST, nodes=ragged(2)).leader([0, 1], [8, 8]) is None


def test_small_steps_say_how_much_longer_a_rank_computes():
    assert small_factor(Joint(9.0, 0.3), own_s=0.2) == pytest.approx(1.5)
    assert small_factor(Joint(9.0, 0.1), own_s=0.2) == 1.0
    assert small_factor(Joint(9.0, 4.0), own_s=0.2) == 3.0  # more is chance


@pytest.mark.parametrize(
    ("own_small_s", "alone_s", "ranks", "factor"),
    [
        (0.2, 1.0, 2, 1.5),  # (1.5 - 0.3) / (1.0 - 0.2): what is fixed falls out
        (0.6, 1.0, 2, 1.5),  # 1.5 / 1.0: the small step is too long to tell
        (0.2, 1.8, 2, 1.8),  # as slow as by itself
        (0.2, 1.8, 1, 2.0),  # 2.0 / 1.0: alone, the whole step counts
        (0.2, 9.0, 2, 3.0),
    ],
)
def test_large_steps_say_how_much_longer_a_rank_computes(own_small_s: float, alone_s: float, ranks: int, factor: float):
    large, small = Joint(2.0, 1.5), Joint(0.7, 0.3)
    found = large_factor(large, small, own_s=1.0, own_small_s=own_small_s, alone_s=alone_s, ranks=ranks)
    assert found == pytest.approx(factor)


def test_a_step_while_others_rest_over_one_in_step_with_them():
    assert alone_factor(0.9, factor=1.5, own_s=1.0, ranks_of_node=2) == pytest.approx(0.6)
    assert alone_factor(1.8, factor=1.5, own_s=1.0, ranks_of_node=2) == 1.0
    assert alone_factor(0.9, factor=1.5, own_s=1.0, ranks_of_node=1) == 1.0


def test_averaging_adds_what_a_small_step_takes_beyond_the_slowest_rank():
    rows = [RankSteps(), RankSteps(small=(SmallStep((0, 1), 0.35),))]
    added = added_by_averaging(profile_of(FAST, SLOW), [0, 1], rows)
    assert added == {1: pytest.approx(0.15)}  # 0.35 - 0.2


def test_averaging_adds_what_is_neither_the_own_step_nor_waiting():
    large = [LargeStep((0, 1), 5, 0.9, 0.5), LargeStep((0, 1), 3, 0.9, 0.7)]
    rows = [RankSteps(large=step) for step in large]
    added = added_by_averaging(profile_of(FAST, SLOW), [0, 1], rows)
    assert added == {0: pytest.approx(0.2), 1: pytest.approx(0.3)}  # 0.9 - 0.5 - (0.7 - 0.5), and 0.9 - 0.6

    rows[0] = RankSteps(large=large[0], lean_s=0.58)  # 0.08 s over its own step
    assert added_by_averaging(profile_of(FAST, SLOW), [0, 1], rows)[0] == pytest.approx((0.2 + 0.08) / 2)
    rows[0] = RankSteps(large=large[0], lean_s=3.0)
    assert added_by_averaging(profile_of(FAST, SLOW), [0, 1], rows)[0] == pytest.approx(0.2)


def test_a_large_step_replaces_a_small_one_and_one_of_a_rank_alone_adds_nothing():
    small = (SmallStep((0, 1), 9.0),)
    large = [LargeStep((1,), 3, 0.9, 0.7), LargeStep((0, 1), 3, 0.9, 0.7)]
    told = [[RankSteps(), RankSteps(small=small, large=step)] for step in large]
    assert added_by_averaging(profile_of(FAST, SLOW), [0, 1], told[0]) == {1: pytest.approx(8.8)}
    assert added_by_averaging(profile_of(FAST, SLOW), [0, 1], told[1]) == {1: pytest.approx(0.3)}


def test_a_profile_is_as_slow_as_ranks_are_in_step_and_then_has_what_averaging_adds():
    rows = [
        RankSteps(factor=1.5, alone=0.8, large=LargeStep((0, 1), 4, 1.0, 0.6)),
        RankSteps(factor=1.0, large=LargeStep((0, 1), 2, 1.0, 0.4)),
        RankSteps(factor=2.0, alone=0.9),
    ]
    found = correct_profile(profile_of(FAST, SLOW, FAST), cluster_of(ragged(2, 1)), rows).devices
    assert [device.step.seconds[0] for device in found] == pytest.approx([0.15, 0.2, 0.2])
    assert [device.alone for device in found] == [0.8, 1.0, 0.9]
    assert found[0].averaging_s == pytest.approx(0.4)  # 1.0 - 4 * 0.15, while the other works
    assert found[1].averaging_s == pytest.approx(0.4)  # 1.0 - 2 * 0.2 - (0.6 - 0.4)
    assert found[2].averaging_s is None  # there is nobody in its node


def test_equal_ranks_of_a_node_share_what_they_saw():
    rows = [
        RankSteps(factor=1.0, alone=0.6),
        RankSteps(factor=2.0, alone=0.8, small=(SmallStep((0, 1), 0.35),)),
        RankSteps(factor=3.0),
    ]
    found = correct_profile(profile_of(FAST, FAST, FAST), cluster_of(ragged(2, 1)), rows).devices
    assert [device.step.seconds[0] for device in found] == pytest.approx([0.15, 0.15, 0.3])
    assert [device.alone for device in found] == pytest.approx([0.7, 0.7, 1.0])
    assert [device.averaging_s for device in found[:2]] == pytest.approx([0.2, 0.2])


def test_a_rank_that_saw_nothing_takes_what_the_next_slower_one_saw_by_their_speeds():
    rows = [RankSteps(), RankSteps(small=(SmallStep((0, 1), 0.35),)), RankSteps()]
    found = correct_profile(profile_of(FAST, SLOW, 4 * FAST), cluster_of(ragged(3)), rows).devices
    assert [device.averaging_s for device in found] == pytest.approx([0.075, 0.15, 0.3])


def test_what_a_rank_tells_is_the_same_after_json():
    row = RankSteps((SmallStep((0, 2), 0.1 + 0.2),), 1.5, 0.7, LargeStep((0, 2), 3, 0.9, 1 / 3), None)
    assert STEPS.validate_json(STEPS.dump_json(row)) == row


def test_ranks_of_a_cut_network_are_corrected_by_what_they_compute():
    profile = profile_of(FAST, SLOW, SLOW)
    joints = [Joint(1.0, 0.9), Joint(1.0, 0.5), Joint(1.0, 0.7)]
    corrections = measured_corrections([0, 1, 2], joints, [0.9, 0.5, 0.5], profile)
    assert corrections == pytest.approx((1.0, 1.2, 1.2))  # equally fast ranks get their mean
    cut_step = CutStep(ranks=(0, 1, 2), factor=1.0, corrections=corrections)
    again = profile.model_copy(update={"cuts": (cut_step,)})
    slower = [Joint(1.0, 0.9), Joint(1.0, 1.0), Joint(1.0, 1.0)]
    assert measured_corrections([0, 1, 2], slower, [0.9, 0.5, 0.5], again) == pytest.approx((1.0, 2.4, 2.4))
    assert measured_corrections([0, 1, 2], joints, [0.9, 0.49, 0.71], again) == corrections  # noise


def test_a_rank_without_layers_is_as_the_others():
    profile = profile_of(FAST, SLOW)
    assert measured_corrections([0, 1], [Joint(1.0, 0.5), Joint(1.0, 0.0)], [0.4, 0.0], profile) == ()
    assert measured_corrections([0, 1], [Joint(1.0, 0.0), Joint(1.0, 0.0)], [0.4, 0.0], profile) == ()
