"""Which cut network is worth trying before a plan is made."""

import pytest
import torch
from torch import nn

from evenly.errors import SpecError
from evenly.graph import trace
from evenly.layouts import lay_out
from evenly.planner import cut_to_try, may_pay
from evenly.planner.costs import GraphCosts
from evenly.planner.replica_options import replica_options_of
from evenly.spec import Curve, CutStep, DeviceProfile, Graph, LayerCurves, Profile
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


def three_devices(graph: Graph, *speeds: float) -> Profile:
    return Profile.from_speeds(cluster_of(len(speeds)), graph, list(speeds))


def with_slow_parts(profile: Profile, graph: Graph, rank: int, *, least: float) -> Profile:
    """Returns the profile with measured layers; of one rank, small parts take `least` of the time of the whole."""
    graph_costs = GraphCosts(graph)
    devices = []
    for device in profile.devices:
        costs, part = graph_costs.on(device), least if device.rank == rank else 1 / 8
        curves = {
            form: curve_of(graph.tensors[graph_costs.layers[name].inputs[1]].shape[0], costs.whole(name), part)
            for name, form in graph_costs.forms.items()
        }
        devices.append(device.model_copy(update={"layers": curves}))
    return profile.model_copy(update={"devices": tuple(devices)})


def test_the_largest_group_is_tried_first_even_if_it_seems_slower(heavy):
    ranks = [0, 1, 2]
    seems_slow = with_slow_parts(three_devices(heavy, 1.0, 0.6, 0.4), heavy, 2, least=0.45)
    predicted = [
        min(option.seconds(8) for option in replica_options_of(group, GraphCosts(heavy), seems_slow))
        for group in ((0, 1), (0, 1, 2))
    ]
    assert predicted[1] > 1.15 * predicted[0]
    assert sorted(cut_to_try(ranks, seems_slow, heavy).ranks) == ranks


def test_after_a_trial_the_fastest_is_tried_that_was_not(heavy):
    ranks = [0, 1, 2]
    profile = three_devices(heavy, 1.0, 0.6, 0.4)
    first = cut_to_try(ranks, profile, heavy)
    slow_together = profile.model_copy(update={"cuts": (CutStep(ranks=first.ranks, factor=1.5),)})
    second = cut_to_try(ranks, slow_together, heavy, tried=[first.layout])
    assert second is None or second.layout != first.layout


def test_what_was_tried_is_an_option(heavy):
    profile = three_devices(heavy, 1.0, 0.6, 0.4)
    layout = lay_out(heavy, [5, 3, 1])  # which no speed would give
    with_trial = profile.model_copy(update={"cuts": (CutStep(ranks=(0, 1, 2), factor=0.8, layout=layout),)})
    options = replica_options_of((0, 1, 2), GraphCosts(heavy), with_trial)
    assert [option.layout for option in options].count(layout) == 1
    assert all(option.layout != layout for option in replica_options_of((0, 1), GraphCosts(heavy), with_trial))


def test_what_was_slower_in_a_trial_is_no_option(heavy):
    profile = three_devices(heavy, 1.0, 0.6, 0.4)
    expected, *_ = replica_options_of((0, 1, 2), GraphCosts(heavy), profile)
    faster = lay_out(heavy, [5, 3, 1])
    cut_step = CutStep(ranks=(0, 1, 2), factor=0.8, layout=faster, slower=(expected.layout,))
    options = replica_options_of((0, 1, 2), GraphCosts(heavy), profile.model_copy(update={"cuts": (cut_step,)}))
    assert expected.layout not in [option.layout for option in options]
    assert faster in [option.layout for option in options]


def test_nothing_more_is_tried_where_whole_networks_are_far_faster(heavy):
    ranks = [0, 1, 2]
    profile = three_devices(heavy, 1.0, 0.6, 0.4)
    first = cut_to_try(ranks, profile, heavy)
    hopeless = profile.model_copy(update={"cuts": (CutStep(ranks=first.ranks, factor=50.0, layout=first.layout),)})
    assert cut_to_try(ranks, hopeless, heavy, tried=[first.layout]) is None
    whole_s = min(device.step.at(8) for device in profile.devices)
    assert may_pay(0.5 * whole_s, ranks, profile, heavy)
    assert not may_pay(50 * whole_s, ranks, profile, heavy)


@pytest.mark.parametrize(
    "wrong", [{"corrections": (1.0,)}, {"corrections": (1.0, 2.0, 3.0, 4.0)}, {"layout": 2}, {"slower": 4}]
)
def test_corrections_and_layouts_are_for_the_ranks(heavy, wrong):
    values = dict(wrong)
    for key in ("layout", "slower"):
        if key in values:
            layout = lay_out(heavy, [1.0] * values[key])
            values[key] = layout if key == "layout" else (layout,)
    with pytest.raises(SpecError, match="ranks"):
        CutStep(ranks=(0, 1, 2), factor=1.0, **values)


def test_a_rank_is_as_fast_in_a_plan_as_it_was_in_the_trial(heavy):
    profile = three_devices(heavy, 1.0, 1.0, 1.0)
    corrected = profile.model_copy(
        update={"cuts": (CutStep(ranks=(0, 1, 2), factor=1.0, corrections=(1.0, 1.0, 2.0)),)}
    )
    speeds = [1 / device.step.at(8) for device in corrected.cut_devices([0, 1, 2])]
    assert speeds[2] == pytest.approx(speeds[0] / 2)
    assert corrected.cut_corrections([0, 2]) == (1.0, 2.0)  # a smaller group learns from it, too
    assert corrected.cut_corrections([2]) == ()  # a whole network does not
    (by_speed, *_) = replica_options_of((0, 1, 2), GraphCosts(heavy), corrected)
    assert by_speed.layout.shares[2] == pytest.approx(by_speed.layout.shares[0] / 2)
    assert Profile.model_validate_json(corrected.model_dump_json()) == corrected


def test_convolutions_take_as_long_as_with_the_next_preferred_number_of_channels():
    graph = trace(nn.Sequential(nn.Conv2d(8, 64, 3), nn.Flatten(), nn.Linear(64 * 4, 64)), torch.zeros(4, 8, 4, 4))
    curves = {form: curve_of(64, 0.64) for form in map(graph.form_of, graph.layers) if form}
    device = DeviceProfile(rank=0, step=Curve(sizes=(4,), seconds=(2.0,)), layers=curves, unit=16)
    costs = GraphCosts(graph).on(device)
    conv, linear = (next(layer.name for layer in graph.layers if layer.op == op) for op in ("conv", "linear"))
    seconds = {count: costs.of(conv, "partitioned", count / 64, count) for count in (8, 16, 17, 32, 33, 64)}
    assert seconds[17] == seconds[32] > seconds[16]
    assert seconds[33] > seconds[32]
    assert seconds[8] < seconds[16]  # fewer than one multiple are as they were measured
    assert costs.of(linear, "partitioned", 17 / 64, 17) < costs.of(linear, "partitioned", 0.5, 32)


def curve_of(size: int, seconds: float, part: float = 1 / 8) -> LayerCurves:
    curve = Curve(sizes=(size // 8, size), seconds=(part * seconds, seconds))
    return LayerCurves(outputs=curve, inputs=curve, samples=Curve(sizes=(1, 8), seconds=(part * seconds, seconds)))
