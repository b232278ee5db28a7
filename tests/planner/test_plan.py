"""Plans from profiles: everybody finishes together, useless devices are left out, memory is kept, the plan says so."""

import re
import time

import pytest
import torch
from torch import nn

from evenly import trace
from evenly.errors import SpecError
from evenly.planner import plan, simulate
from evenly.planner.costs import GraphCosts
from evenly.planner.memory import MemoryNeed
from evenly.planner.reasons import why_cut
from evenly.planner.replica_options import ReplicaOption, replica_options_of
from evenly.spec import Cluster, Curve, Device, EverySteps, Exchange, Graph, Node, Plan, Profile, Rate

GB = 10**9


def cluster_of(*sizes: int, memory: int = 0) -> Cluster:
    nodes, first = [], 0
    for index, size in enumerate(sizes):
        devices = [Device(kind="cpu", cores=1, memory_bytes=memory)] * size
        nodes.append(Node(name=f"n{index}", ranks=range(first, first + size), devices=devices))
        first += size
    return Cluster(nodes=nodes)


@pytest.fixture(scope="module")
def graph() -> Graph:
    body = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return trace(nn.Sequential(*body, nn.Flatten(), nn.Linear(32 * 64, 10)), torch.randn(100, 3, 8, 8))


def planned(graph: Graph, speeds: list[float], *sizes: int, fast: bool = True, **wishes) -> Plan:
    cluster = cluster_of(*(sizes or (len(speeds),)))
    inside = Rate(latency_s=1e-6, bytes_per_s=1e12) if fast else Rate(latency_s=1e-4, bytes_per_s=1e9)
    profile = Profile.from_speeds(cluster, graph, speeds, flops_per_s=1e9, inside=inside)
    return plan(cluster, profile, graph, **wishes)


def samples(made: Plan) -> list[int]:
    return [role.samples for role in made.roles]


@pytest.mark.parametrize(
    ("speeds", "expected"), [([1, 1], [50, 50]), ([3, 1], [75, 25]), ([100, 30], [77, 23]), ([70, 25, 5], [70, 25, 5])]
)
def test_samples_follow_the_speeds(graph, speeds, expected):
    assert samples(planned(graph, speeds)) == expected


def test_a_node_of_a_hundred_ranks_is_planned_soon(graph):
    began = time.perf_counter()
    made = planned(graph, [1 + rank % 7 for rank in range(100)], batch_size=800, cut=False)
    assert time.perf_counter() - began < 40  # on a busy machine; it took minutes once
    assert sum(samples(made)) == 800
    assert max(samples(made)[0::7]) < min(samples(made)[6::7])  # the slowest and the fastest


def test_thousands_of_nodes_are_simulated_soon(graph):
    cluster = cluster_of(*[1] * 8000)
    profile = Profile.from_speeds(cluster, graph, [1 + rank % 2 for rank in range(8000)])
    made = Plan.even(cluster, batch_size=8, period=EverySteps(50))
    began = time.perf_counter()
    assert len(simulate(made, cluster, profile, graph, steps=100, jitter=0.1).devices) == 8000
    assert time.perf_counter() - began < 20  # on a busy machine; it took more than a minute once


def test_a_global_batch_is_dealt_out_over_all_nodes(graph):
    made = planned(graph, [4, 4, 1, 1], 2, 2, batch_size=1000, every=7)
    assert samples(made) == [400, 400, 100, 100]
    assert made.period == EverySteps(7)
    assert made.batch_size == 1000


def test_a_useless_device_is_left_out_and_the_plan_says_why(graph):
    made = planned(graph, [100, 0.01], fast=False)
    assert samples(made) == [100, 0]
    assert made.active == [0]
    assert "rank 1 (cpu) is left out:" in made.explain()
    assert "ms" in made.roles[1].left_out


@pytest.mark.parametrize(("speeds", "expected"), [([70, 25, 2], [47, 17, 0]), ([70, 25, 5], [45, 16, 3])])
def test_a_device_that_would_wait_for_long_and_help_little_is_left_out(graph, speeds, expected):
    made = planned(graph, speeds, batch_size=64, cut=False)
    assert samples(made) == expected
    assert ("busy for 74% of a step" in made.roles[2].left_out) == (expected[2] == 0)


def test_ranks_that_would_wait_are_left_out_in_equal_nodes_alike_and_others_take_over(graph):
    made = planned(graph, [40, 0.9, 40, 0.9, 400], 2, 2, 1, batch_size=480, cut=False)
    assert samples(made) == [40, 0, 40, 0, 400]
    assert made.predicted.step_s < 1.03 * planned(graph, [40, 40, 400], 1, 1, 1, batch_size=480).predicted.step_s


def test_a_device_that_waits_stays_where_steps_are_much_shorter_with_it(graph):
    assert samples(planned(graph, [10, 6], batch_size=3, cut=False)) == [2, 1]  # 0.2 and 0.17 s; 0.3 s without it


def test_a_device_with_a_large_fixed_cost_gets_nothing(graph):
    cluster = cluster_of(2)
    profile = Profile.from_speeds(cluster, graph, [1, 1])
    slow = profile.devices[1].model_copy(update={"step": Curve(sizes=(1, 100), seconds=(9.0, 9.1))})
    fast = profile.devices[0].model_copy(update={"step": Curve(sizes=(1, 100), seconds=(0.1, 1.0))})
    assert samples(plan(cluster, profile.model_copy(update={"devices": (fast, slow)}), graph)) == [100, 0]


def test_exchanges_take_no_more_than_the_budget(graph):
    made = planned(graph, [1, 1, 1], 2, 1, exchange_budget=0.02)
    assert isinstance(made.period, EverySteps)
    predicted = made.predicted
    assert predicted is not None
    assert predicted.exchange_s / (made.period.steps * predicted.step_s + predicted.exchange_s) <= 0.02


@pytest.mark.parametrize(("sizes", "least"), [((1, 1), 8), ((2,), 8)])
def test_periods_leave_room_for_overlap_and_fragments(graph, sizes, least):
    made = planned(graph, [1] * 2, *sizes, batch_size=1000, exchange=Exchange(overlap=8, fragments=4))
    assert made.period.steps >= least


def test_an_exchange_beside_the_training_is_forecast_to_cost_nothing(graph):
    cluster = cluster_of(1, 1)
    profile = Profile.from_speeds(cluster, graph, [1, 1], flops_per_s=1e9)
    forecasts = []
    for exchange in (Exchange(), Exchange(overlap=10), Exchange(codec="int8")):
        made = plan(cluster, profile, graph, batch_size=1000, every=10, exchange=exchange)
        forecasts.append(simulate(made, cluster, profile, graph, steps=100))
    waiting, beside, coded = forecasts
    assert beside.seconds < coded.seconds < waiting.seconds
    assert coded.devices[0].sent_bytes < 0.3 * waiting.devices[0].sent_bytes
    timed = plan(cluster, profile, graph, batch_size=1000, every=f"{waiting.seconds}s")
    assert simulate(timed, cluster, profile, graph, steps=100).exchanges <= 2


def test_memory_is_kept(graph):
    free = made_bytes(graph, 30)
    made = planned(graph, [1, 1], memory_bytes=[free, 100 * GB], cut=False)
    assert 25 <= samples(made)[0] <= 30
    assert sum(samples(made)) == 100
    assert made.roles[0].memory_bytes <= free
    assert "rank 0: no memory for more samples" in made.explain()
    assert planned(graph, [1, 1], memory_bytes=[100 * GB, 100 * GB], cut=False).remarks == []


def made_bytes(graph: Graph, count: int) -> int:
    return 4 * graph.parameter_bytes + count * graph.sample_bytes


@pytest.fixture(scope="module")
def heavy() -> Graph:
    """Nearly all of its memory is parameters."""
    layers = [nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)]
    return trace(nn.Sequential(*layers), torch.randn(8, 256))


@pytest.mark.parametrize("parts", [(0.3, 0.9), (0.9, 0.3), (0.3, 0.3, 0.6), (0.2, 0.2, 0.2, 0.6)])
def test_shares_of_a_cut_network_follow_memory_where_no_device_holds_all_of_it(heavy, parts):
    whole = 4 * heavy.parameter_bytes + 8 * heavy.sample_bytes
    memory = [int(part * whole) for part in parts]
    made = planned(heavy, [1.0] * len(parts), memory_bytes=memory)
    (replica,) = made.replicas
    assert all(made.roles[rank].memory_bytes <= memory[rank] for rank in replica.ranks)
    assert made.batch_size == 8
    largest = max(replica.ranks, key=lambda rank: memory[rank])
    assert made.roles[largest].memory_bytes == max(made.roles[rank].memory_bytes for rank in replica.ranks)
    assert re.search("ranks .* together: .* GB do not hold a whole network and a sample", made.explain())


def test_a_network_is_cut_because_the_batch_needs_the_memory_or_because_it_is_faster(heavy):
    one = 4 * heavy.parameter_bytes + heavy.sample_bytes
    made = planned(heavy, [1.0, 1.0], memory_bytes=[one, one])
    assert made.remarks == ["ranks 0, 1 together: whole networks have memory for 2 of the 8 samples"]
    assert why_cut((0, 1), MemoryNeed(100, 10), [500, 500], 80, 8) == "so steps are shorter"


class GroupedAttention(nn.Module):
    """Six query heads, two key heads, one fused projection: the parts have unlike units."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(96, 96 + 2 * 32), nn.Linear(96, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split([96, 32, 32], dim=-1)
        q, k, v = (part.view(*part.shape[:2], -1, 16).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(3, dim=1) for part in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(x.shape))


def test_parts_of_unlike_units_can_be_planned():
    graph = trace(GroupedAttention(), torch.randn(2, 8, 96))
    made = planned(graph, [3.0, 1.0], memory_bytes=[4 * graph.parameter_bytes, 4 * graph.parameter_bytes])
    assert made.batch_size == 2


def test_impossible_memory_is_told_with_the_layer_and_how_much_is_missing(graph):
    with pytest.raises(SpecError, match=r"largest layer is '5\.weight'.* GB too little"):
        planned(graph, [1, 1], memory_bytes=[1000, 1000])


@pytest.mark.parametrize("speeds", [[0, 1], [float("nan"), 1], [-1, 1], [float("inf"), 1], [1e-308, 1], [1], "11"])
def test_impossible_speeds_are_refused(graph, speeds):
    with pytest.raises(SpecError, match="speeds"):
        Profile.from_speeds(cluster_of(2), graph, speeds)


def test_a_profile_of_another_cluster_or_network_is_refused(graph):
    profile = Profile.from_speeds(cluster_of(2), graph, [1, 1])
    with pytest.raises(SpecError, match="another cluster"):
        plan(cluster_of(1, 1), profile, graph)
    other = trace(nn.Linear(3, 4), torch.ones(2, 3))
    with pytest.raises(SpecError, match="another network"):
        plan(cluster_of(2), profile, other)
    fewer = profile.model_copy(update={"devices": profile.devices[:1]})
    with pytest.raises(SpecError, match="a profile of 1 devices was given for a cluster of 2 ranks"):
        plan(cluster_of(2), fewer, graph)


@pytest.mark.parametrize("batch", [1.5, "a", True, 0])
def test_a_batch_that_is_no_whole_number_is_refused(graph, batch):
    with pytest.raises(SpecError, match="Give a whole number"):
        planned(graph, [1, 1], batch_size=batch)


def test_a_long_period_is_forecast_with_one_exchange(graph):
    cluster = cluster_of(1, 1)
    profile = Profile.from_speeds(cluster, graph, [1, 1], flops_per_s=1e9)
    made = plan(cluster, profile, graph, every=50_000)
    told = simulate(made, cluster, profile, graph, steps=50_000)
    step_s, exchange_s = made.predicted.step_s, made.predicted.exchange_s
    assert told.exchanges == 1
    assert told.seconds == pytest.approx(50_000 * step_s + exchange_s)


def test_a_plan_whose_samples_do_not_add_up_is_refused(graph):
    text = planned(graph, [3, 1]).to_json()
    with pytest.raises(SpecError, match="add up to 101, not to the batch_size of 100"):
        Plan.from_json(text.replace('"samples": 75', '"samples": 76'))


@pytest.mark.parametrize(
    "wish",
    [
        {"batch_size": 0},
        *({"exchange_budget": part} for part in (0.0, 1e-320, None, "x")),
        *({"memory_bytes": sizes} for sizes in ([1], 5, ["a", 1])),
    ],
)
def test_impossible_wishes_are_refused(graph, wish):
    with pytest.raises(SpecError):
        planned(graph, [1, 1], **wish)


def test_one_sample_is_cut_over_devices_where_that_is_faster():
    wide = trace(nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512)), torch.randn(1, 512))
    made = planned(wide, [3, 2])
    assert [replica.ranks for replica in made.replicas] == [(0, 1)]
    alone = planned(wide, [3, 2], cut=False)
    assert made.predicted is not None
    assert alone.predicted is not None
    assert made.predicted.step_s < 0.7 * alone.predicted.step_s


def test_a_plan_without_samples_is_not_simulated(graph):
    cluster = cluster_of(2)
    with pytest.raises(SpecError, match="without samples"):
        simulate(Plan.even(cluster), cluster, Profile.from_speeds(cluster, graph, [1, 1]), graph)


def test_a_period_of_epochs_is_simulated_with_as_many_steps(graph):
    cluster = cluster_of(1, 1)
    profile = Profile.from_speeds(cluster, graph, [1, 1])
    made = plan(cluster, profile, graph, every="5 epochs")
    assert simulate(made, cluster, profile, graph, steps=10_000).exchanges == 2
    assert simulate(made, cluster, profile, graph, steps=200, steps_per_epoch=10).exchanges == 4


def test_a_plan_is_the_same_every_time(graph):
    assert planned(graph, [5, 3, 2, 2], 2, 2, fast=False) == planned(graph, [5, 3, 2, 2], 2, 2, fast=False)


def test_a_forecast_is_what_the_plan_predicts(graph):
    cluster = cluster_of(2, 1)
    profile = Profile.from_speeds(cluster, graph, [2, 1, 1], flops_per_s=1e9)
    made = plan(cluster, profile, graph, every=10)
    told = simulate(made, cluster, profile, graph, steps=100)
    assert told.exchanges == 10
    assert made.predicted is not None
    assert told.seconds == pytest.approx(100 * made.predicted.step_s + 10 * made.predicted.exchange_s, rel=0.02)
    assert sum(device.samples for device in told.devices) == made.batch_size
    shaken = simulate(made, cluster, profile, graph, steps=100, jitter=0.2)
    assert shaken.seconds > told.seconds


def test_half_the_link_makes_exchanges_longer_and_a_longer_period_helps(graph):
    cluster = cluster_of(1, 1)

    def seconds(speed: float, every: int) -> float:
        across = Rate(latency_s=1e-3, bytes_per_s=speed)
        profile = Profile.from_speeds(cluster, graph, [1, 1], flops_per_s=1e9, across=across)
        return simulate(plan(cluster, profile, graph, every=every), cluster, profile, graph, steps=200).seconds

    assert seconds(1e6, 10) < seconds(5e5, 10)
    assert seconds(5e5, 100) < seconds(5e5, 10)


def recurrent_option(latency_s: float) -> tuple[str, ReplicaOption]:
    with torch.device("meta"):
        graph = trace(nn.Sequential(nn.LSTM(512, 512, batch_first=True)), torch.empty(2, 16, 512))
    inside = Rate(latency_s=latency_s, bytes_per_s=1e9)
    profile = Profile.from_speeds(cluster_of(2), graph, [3, 1], flops_per_s=2e10, inside=inside)
    option = replica_options_of((0, 1), GraphCosts(graph), profile)[0]
    assert option.layout is not None
    (mode,) = [choice.mode for choice in option.layout.choices if choice.op == "recurrent"]
    return mode, option


def test_links_decide_whether_a_recurrent_layer_is_cut_by_units():
    mode, option = recurrent_option(1e-5)
    assert mode == "units"
    gathers = [segment for segment in option.timeline.segments if segment.collective_s]
    assert len(gathers) >= 30  # one for each step but the last, forward and backward
    assert recurrent_option(1e-1)[0] == "whole"
