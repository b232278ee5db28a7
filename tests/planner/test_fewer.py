"""Nodes that cost more in exchanges than they help are left out, whatever the period."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from evenly import trace
from evenly.planner import plan, simulate
from evenly.planner.fewer_nodes import try_sets
from evenly.spec import Adaptive, Cluster, Device, EverySteps, Exchange, Graph, Node, Plan, Profile, Rate
from evenly.spec.profile import Link

SLOW = Rate(latency_s=1e-4, bytes_per_s=1e6)


def graph() -> Graph:
    return trace(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), torch.randn(100, 64))


GRAPH = graph()


def world(speeds: list[float], sizes: list[int], across: Rate) -> tuple[Cluster, Profile]:
    nodes, first = [], 0
    for index, size in enumerate(sizes):
        ranks = range(first, first + size)
        nodes.append(Node(name=f"n{index}", ranks=ranks, devices=[Device(kind="cpu")] * size))
        first += size
    cluster = Cluster(nodes=nodes)
    return cluster, Profile.from_speeds(cluster, GRAPH, speeds, flops_per_s=1e8 * max(speeds), across=across)


def planned(speeds: list[float], sizes: list[int] | None = None, across: Rate = SLOW, **wishes) -> tuple[Plan, float]:
    """Returns the plan and its mean step."""
    cluster, profile = world(speeds, sizes or [1] * len(speeds), across)
    made = plan(cluster, profile, GRAPH, cut=False, **wishes)
    steps = made.period.steps if isinstance(made.period, EverySteps) else 1000
    return made, simulate(made, cluster, profile, GRAPH, steps=steps).seconds / steps


@pytest.mark.parametrize("every", [None, 1, 4, "global", "0.01s", "5%"])
def test_a_node_that_costs_more_than_it_helps_is_left_out(every):
    made, mean_s = planned([70, 2], batch_size=256, every=every)
    assert made.active == [0]
    assert mean_s == pytest.approx(planned([70], batch_size=256)[1])
    assert "rank 1 (cpu) is left out: exchanges with this node cost more than it helps" in made.explain()


@pytest.mark.parametrize("wish", [{"every": "epoch"}, {"every": 1000}, {"exchange": Exchange(overlap=100)}])
def test_it_stays_where_exchanges_are_seldom_or_nobody_waits_for_them(wish):
    assert planned([70, 2], batch_size=256, **wish)[0].active == [0, 1]


def test_a_wish_for_drift_does_not_tell_how_often_nodes_will_exchange():
    assert planned([70, 40], batch_size=256, every=Adaptive(drift=0.1))[0].active == [0, 1]


def test_one_of_equal_nodes_is_left_where_all_others_only_cost():
    made, _ = planned([1, 1] * 4, [2] * 4, across=Rate(latency_s=1.0, bytes_per_s=1e6), every="global")
    assert made.active == [0, 1]


@pytest.mark.parametrize("sizes", [[1, 2], [1, 1, 1]])
def test_ranks_keep_reasons_of_their_own(sizes):
    made, _ = planned([70, 2, 0.2], sizes, batch_size=256, every=1)
    assert "exchanges with this node" in made.roles[1].left_out
    assert "one sample would take it" in made.roles[2].left_out


def test_a_rank_that_would_wait_says_so_also_where_a_node_is_left_out():
    seldom, often = (planned([70, 25, 0.5], batch_size=256, every=every)[0] for every in ("epoch", 1))
    assert (seldom.active, often.active) == ([0, 1], [0])
    assert seldom.roles[2].left_out == often.roles[2].left_out
    assert "it would be busy for" in often.roles[2].left_out


FAST = Rate(latency_s=1e-5, bytes_per_s=1e9)
WEAK = Rate(latency_s=1e-2, bytes_per_s=1e5)


def wired(speeds: list[float], far: set[frozenset[int]], pairs: list[tuple[int, int]] | None = None, **wishes) -> Plan:
    """Returns a plan for nodes of one rank with fast wires, but between some of them; only `pairs` were measured."""
    cluster, profile = world(speeds, [1] * len(speeds), across=FAST)
    pairs = pairs or list(combinations(range(len(speeds)), 2))
    rates = {pair: WEAK if frozenset(pair) in far else FAST for pair in pairs}
    ways = [(a, b, rate) for (x, y), rate in rates.items() for a, b in ((x, y), (y, x))]
    lanes = tuple(Link(source=a, target=b, rate=rate) for a, b, rate in ways)
    return plan(cluster, profile.model_copy(update={"lanes": lanes}), GRAPH, cut=False, **wishes)


def test_a_strong_node_behind_a_slow_wire_is_left_out():
    assert wired([4, 3, 3], {frozenset((0, 1)), frozenset((0, 2))}, every=1).active == [1, 2]


def test_of_equal_nodes_that_behind_a_slow_wire_is_left_out():
    made = wired([3, 3, 3], {frozenset((0, 1)), frozenset((0, 2))}, every=1)
    assert made.active == [1, 2]
    assert "exchanges with this node" in made.roles[0].left_out


def test_islands_of_fast_wires_are_found():
    between = {frozenset((a, b)) for a in (0, 1) for b in (2, 3)}
    assert wired([10, 8, 9, 7], between, every=1).active == [0, 1]
    assert wired([10, 2, 9, 8], between, every=1).active == [2, 3]


@pytest.mark.parametrize(("count", "near"), [(9, 5), (12, 7), (40, 23)])
def test_all_nodes_of_a_site_are_found(count, near):
    far = {frozenset(pair) for pair in combinations(range(count), 2) if max(pair) >= near}
    assert wired([1] * count, far, every="global", batch_size=20 * count).active == list(range(near))


def test_a_site_of_weaker_nodes_is_found():
    far = {frozenset(pair) for pair in combinations(range(12), 2) if min(pair) < 4}
    assert wired([1.1] * 4 + [1] * 8, far, every="global", batch_size=240).active == list(range(4, 12))


def test_of_equal_ranks_the_later_are_left_out_and_say_why():
    made, _ = planned([1, 1, 1, 1], every="epoch", batch_size=2)
    assert made.active == [0, 1]
    assert made.roles[3].left_out == "the batch is done as soon without it"


def test_nodes_that_average_unlike_are_not_equal():
    cluster, profile = world([1, 1, 1, 1], [2, 2], FAST)
    slow = [d.model_copy(update={"averaging_s": 5.0 if d.rank > 1 else 0.0}) for d in profile.devices]
    profile = profile.model_copy(update={"devices": tuple(slow)})
    made = plan(cluster, profile, GRAPH, cut=False, every="epoch", batch_size=400)
    told = simulate(made, cluster, profile, GRAPH, steps=1000)
    assert told.step_s == pytest.approx(made.predicted.step_s, rel=0.01)


def test_wires_that_were_not_measured_are_not_taken_to_be_fast():
    report = [(a, (a + 1) % 9) for a in range(9)]
    made = wired([2, 1] * 4 + [2], set(map(frozenset, report)), report, every=1)
    assert made.active == [0]  # not every other node, of which no two are neighbours


def test_nodes_are_kept_where_memory_needs_them():
    free = 4 * GRAPH.parameter_bytes + 60 * GRAPH.sample_bytes
    made, _ = planned([1, 1, 1], every="global", batch_size=100, memory_bytes=[free] * 3)
    assert len(made.active) == 2


@settings(deadline=None, max_examples=30)
@given(
    speeds=st.lists(st.floats(0.5, 100), min_size=2, max_size=4),
    log_bandwidth=st.floats(4, 9),
    latency=st.floats(-6, -1),
    every=st.sampled_from([None, 1, 7, "global"]),
)
def test_no_set_of_nodes_is_clearly_faster(speeds, log_bandwidth, latency, every):
    link = Rate(latency_s=10**latency, bytes_per_s=10**log_bandwidth)
    made, mean_s = planned(speeds, across=link, every=every, batch_size=10_000)
    for size in range(1, len(speeds) + 1):
        for some in combinations(speeds, size):
            _, other_s = planned(list(some), across=link, every=every, batch_size=10_000)
            assert mean_s <= 1.02 * other_s, (some, made.explain())


def test_each_fragment_overlaps_with_steps_of_its_own():
    made, cluster, profile = planned([1, 1], every=8, exchange=Exchange(overlap=2))[0], *world([1, 1], [1, 1], SLOW)
    plans = [made, made.model_copy(update={"exchange": Exchange(overlap=2, fragments=3)})]
    one, three = (simulate(each, cluster, profile, GRAPH, steps=8).seconds for each in plans)
    step_s = made.predicted.step_s
    assert one - three == pytest.approx(min(4 * step_s, one - 8 * step_s))


@settings(deadline=None, max_examples=20)
@given(
    speeds=st.lists(st.floats(1, 100), min_size=3, max_size=4),
    slow=st.sets(st.sampled_from([frozenset(pair) for pair in combinations(range(4), 2)])),
    every=st.sampled_from([1, 7, "global"]),
)
def test_no_set_of_nodes_is_clearly_faster_where_wires_are_unlike(speeds, slow, every):
    wishes = {"every": every, "batch_size": 10_000}
    mean_s = mean_of(wired(speeds, slow, **wishes))
    for size in range(1, len(speeds)):
        for some in combinations(range(len(speeds)), size):
            far = {frozenset(map(some.index, pair)) for pair in slow if pair <= set(some)}
            alone = wired([speeds[node] for node in some], far, **wishes)
            assert mean_s <= 1.02 * mean_of(alone), some


def mean_of(made: Plan) -> float:
    """Returns the mean step that a plan predicts; that of gradients has its exchanges in it."""
    steps = made.period.steps if isinstance(made.period, EverySteps) else None
    return made.predicted.step_s + (made.predicted.exchange_s / steps if steps else 0.0)


def asked(strong: dict[int, int], far: dict[int, dict[int, float]], batch: int, best: int) -> set[int]:
    """Returns the sizes of the sets that are asked for, where that of `best` nodes is the fastest."""
    sizes = set()

    def mean_of(nodes: frozenset[int]) -> float:
        sizes.add(len(nodes))
        return abs(len(nodes) - best) + 1.0

    try_sets(strong, strong, far, batch, mean_of)
    return sizes


def test_few_sizes_are_tried_where_nodes_are_many_and_the_best_is_among_them():
    each = dict.fromkeys(range(10_000), 3)
    for best in (100, 357, 4711, 9_999):
        sizes = asked(each, {}, 300, best)
        assert best in sizes
        assert len(sizes) < 80
    assert asked({0: 1, 1: 1}, {}, 2, 1) == set()
    assert asked(dict.fromkeys(range(12), 1), {}, 3, 7) == set(range(3, 12))
