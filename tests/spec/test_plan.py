"""Clusters and plans: what they answer, and how a file edited by hand is corrected."""

import json

import pytest
from hypothesis import given

from evenly.errors import SpecError
from evenly.spec import (
    Cluster,
    Device,
    EveryEpoch,
    EveryGradient,
    EverySteps,
    Exchange,
    Node,
    Plan,
    Prediction,
    Replica,
    Role,
    deal,
)
from evenly.spec.layout import Choice, Cut, Layout, TensorPlacement, ranges
from tests.ranks import cluster_of, ragged
from tests.spec.values import clusters, plans

CPU = Device(kind="cpu")


def edit(plan, path, value):
    """Returns the plan's JSON with the value at `path` replaced, or taken away where the value is `...`."""
    tree = json.loads(plan.to_json())
    node = tree
    for part in path[:-1]:
        node = node[part]
    if value is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("roles", 1), ..., r"roles must be given for ranks 0\.\.1 in order; they are for \[0, 2\]"),
        (("roles",), [], "roles: .*at least 1 item"),
        (("roles", 0, "rank"), 1, r"they are for \[1, 1, 2\]"),
        (("roles", 0, "rank"), -1, r"roles\.0\.rank: .*given -1"),
        (("roles", 0, "rank"), ..., r"roles\.0\.rank: Field required"),
        (("roles", 2, "node"), 2, r"nodes must be numbered 0\.\.1; the roles name \[0, 2\]"),
        (("roles", 2, "samples"), 0, r"ranks \[2\] have no samples while others do"),
        (("roles", 2, "samples"), -4, r"roles\.2\.samples: .*given -4"),
        (("roles", 2, "samples"), float("nan"), r"roles\.2\.samples: .*finite.*given nan"),
        (("roles", 2, "samples"), 1.5, r"roles\.2\.samples: .*given 1\.5"),
        (("period", "steps"), 0, r"period\.steps: .*greater than or equal to 1, given 0"),
        (("period", "steps"), -1, r"period\.steps: .*given -1"),
        (("period", "steps"), True, r"period\.steps: .*given True"),
        (("period", "steps"), ..., r"period\.steps: Field required"),
        (("period", "kind"), "year", "period: .*'year'"),
        (("period", "kind"), ..., "period: .*'kind'"),
        (("period",), 8, "period: .*given 8"),
        (("exchange", "timeout_s"), float("nan"), r"exchange\.timeout_s: .*finite.*given nan"),
        (("exchange", "timeout_s"), float("inf"), r"exchange\.timeout_s: .*finite.*given inf"),
        (("exchange", "timeout_s"), 0, r"exchange\.timeout_s: .*given 0"),
        (("exchange", "optimizer_state"), "sum", r"exchange\.optimizer_state: .*'keep', 'average' or 'reset'"),
    ],
)
def test_a_hand_edited_plan_is_refused_with_file_and_field(tmp_path, plan_2_1, path, value, told):
    file = tmp_path / "plan.json"
    file.write_text(edit(plan_2_1, path, value))
    with pytest.raises(SpecError, match=rf"(?s)^{file}: Plan is not valid: .*{told}"):
        Plan.load(file)


def test_what_a_file_leaves_out_has_its_usual_value(plan_2_1):
    text = json.dumps({"roles": [{"rank": 0, "node": 0}]})
    assert Plan.from_json(text) == Plan(roles=(Role(rank=0, node=0),), period=EveryEpoch(), exchange=Exchange())
    assert Plan.from_json(edit(plan_2_1, ("exchange",), ...)) == plan_2_1


def test_every_error_of_a_value_is_told_at_once():
    with pytest.raises(SpecError) as caught:
        Role(rank=-1, node="x", speed=3)
    for field in ("rank", "node", "speed: unknown field"):
        assert field in str(caught.value)


@given(plans())
def test_the_nodes_of_a_plan_hold_every_rank_once(plan):
    assert sorted(rank for ranks in plan.nodes for rank in ranks) == list(range(len(plan.roles)))
    for node, ranks in enumerate(plan.nodes):
        assert all(plan.roles[rank].node == node for rank in ranks)


@given(plans())
def test_a_plan_explains_every_rank(plan):
    text = plan.explain()
    assert len(text.splitlines()) >= 1 + len(plan.nodes)
    for role in plan.roles:
        assert f"rank {role.rank} ({role.device})" in text


def test_a_plan_in_words():
    cluster = cluster_of(ragged(2, 1))
    even = Plan.even(cluster, batch_size=4, period=EverySteps(50, warmup=10), exchange=Exchange())
    assert even.explain() == (
        "3 ranks on 2 nodes; gradients are averaged inside each node at every step, parameters across nodes every 50 "
        "steps (every step for the first 10); optimizer state is kept local\n"
        "node 0: rank 0 (cpu) 4 samples a step, rank 1 (cpu) 4 samples a step\n"
        "node 1: rank 2 (cpu) 4 samples a step"
    )
    averaged = Plan.even(cluster, period=EverySteps(1), exchange=Exchange(optimizer_state="average")).explain()
    assert "across nodes every step; optimizer state is averaged too\n" in averaged
    alone = Plan.even(cluster_of([[0]]), batch_size=1).explain()
    assert alone == "1 rank on 1 node; one rank takes all samples\nnode 0: rank 0 (cpu) 1 sample a step"
    near = Plan.even(cluster_of(ragged(2)), batch_size=1).explain()
    assert near.startswith("2 ranks on 1 node; gradients are averaged at every step\n")
    assert "over all ranks at every step" in Plan.even(cluster, period=EveryGradient()).explain()


def test_a_plan_with_predictions_tells_them():
    roles = (
        Role(rank=0, node=0, samples=6, compute_s=0.02, memory_bytes=3_000_000),
        Role(rank=1, node=0, left_out="too slow"),
        Role(rank=2, node=1, samples=2),
    )
    predicted = Prediction(step_s=0.025, exchange_s=0.1, is_measured=False)
    assert Plan(roles=roles, period=EverySteps(4), predicted=predicted).explain() == (
        "2 of 3 ranks on 2 nodes; parameters are averaged across nodes every 4 steps; optimizer state is kept local\n"
        "node 0: rank 0 (cpu) 6 samples a step (computes 20 ms, needs 3 MB)\n"
        "node 1: rank 2 (cpu) 2 samples a step\n"
        "rank 1 (cpu) is left out: too slow\n"
        "predicted from the speeds you gave: a step takes 25 ms, an exchange 100 ms"
    )


def layout(*shares: float) -> Layout:
    """Returns the layout of a network of one layer: 6 outputs dealt out over the ranks that have a share."""
    members = tuple(rank for rank, share in enumerate(shares) if share)
    cut = Cut(size=6, segments=ranges(deal(6, [shares[rank] for rank in members])))
    sharded = TensorPlacement("sharded", 1, 0)
    choices = (
        Choice(layer="a", op="linear", mode="partitioned", gives=(sharded,)),
        Choice(layer="b", op="attention", mode="local", needs=(sharded,), gives=(sharded,)),
        Choice(layer="c", op="linear", mode="reduced", needs=(sharded,)),
        Choice(layer="d", op="linear", mode="bystander", gives=(sharded,)),
        Choice(layer="e", op="embedding", mode="columns", gives=(sharded,)),
        Choice(layer="f", op="linear", mode="whole"),
    )
    return Layout(graph="g", shares=shares, members=members, cuts=(cut,), choices=choices)


def test_a_layout_in_words_has_a_column_for_every_rank():
    text = layout(2, 1, 0).explain()
    assert "left out: ranks [2]" in text
    said = [" ".join(line.split()) for line in text.splitlines()[2:]]
    assert said == [
        "a linear partitioned 4 / 2 / 0 of 6 outputs",
        "b attention local 4 / 2 / 0 of 6 heads",
        "c linear reduced 4 / 2 / 0 of 6 inputs",
        "d linear bystander 4 / 2 / 0 of 6 indices of dim 1",
        "e embedding columns 4 / 2 / 0 of 6 columns",
        "f linear whole whole on every rank",
    ]


def cut_plan(nodes: list[list[int]], *replicas: Replica) -> list[str]:
    """Returns the words for these networks, without those on single layers."""
    even = Plan.even(cluster_of(nodes), batch_size=50, period=EverySteps(9))
    text = Plan(**{**dict(even), "replicas": replicas}).explain()
    return [line for line in text.splitlines() if not line.startswith("  ")]


def test_a_plan_with_one_cut_network_in_words():
    assert cut_plan(ragged(3), Replica(ranks=(0, 1, 2), layout=layout(3, 2, 1))) == [
        "3 ranks on 1 node",
        "node 0: ranks 0, 1, 2 (cpu) hold one network, 50 samples a step",
        "layout: shares 3, 2, 1; 0 MB in 0 messages a step (all ranks together)",
    ]


def test_a_plan_with_several_cut_networks_tells_equal_layouts_once():
    pairs = [Replica(ranks=(rank, rank + 1), layout=layout(2, 1)) for rank in (0, 2, 4)]
    head, *told = cut_plan(ragged(4, 2), *pairs)
    assert "gradients are averaged inside each node" in head
    assert told == [
        "node 0: ranks 0, 1 (cpu) hold one network, 50 samples a step; "
        "ranks 2, 3 (cpu) hold one network, 50 samples a step",
        "node 1: ranks 4, 5 (cpu) hold one network, 50 samples a step",
        "layout of each network: shares 2, 1; 0 MB in 0 messages a step (all ranks together)",
    ]
    alone = Replica(ranks=(2,), layout=layout(1))
    head, *told = cut_plan(ragged(2, 1), pairs[0], alone)
    assert (
        head == "3 ranks on 2 nodes; parameters are averaged across nodes every 9 steps; optimizer state is kept local"
    )
    assert told[1] == "node 1: rank 2 (cpu) holds one network, 50 samples a step"
    assert [line.split(":")[0] for line in told[2:]] == ["layout of ranks 0, 1", "layout of rank 2"]


@given(clusters())
def test_an_even_plan_follows_the_cluster(cluster):
    plan = Plan.even(cluster, batch_size=3)
    assert [sorted(ranks) for ranks in cluster.rank_lists()] == plan.nodes
    assert all(role.samples == 3 for role in plan.roles)
    assert all(cluster.device_of(role.rank).kind == role.device for role in plan.roles)
    assert plan.period == EveryEpoch()


@given(clusters())
def test_a_cluster_knows_the_node_and_device_of_every_rank(cluster):
    assert cluster.world_size == sum(len(node.ranks) for node in cluster.nodes)
    for rank in range(cluster.world_size):
        node = cluster.nodes[cluster.node_of(rank)]
        assert cluster.device_of(rank) == node.devices[node.ranks.index(rank)]


@pytest.mark.parametrize("ranks", [[[0], [0]], [[0], [2]], [[1], [2]], [[0, 0]]])
def test_ranks_of_a_cluster_stand_on_one_node_each(ranks):
    with pytest.raises(SpecError, match="each once"):
        cluster_of(ranks)


def test_impossible_clusters_are_refused():
    with pytest.raises(SpecError, match=r"ranks"):
        Node(name="empty", ranks=(), devices=())
    with pytest.raises(SpecError, match="'big' has 2 ranks but 1 devices"):
        Node(name="big", ranks=(0, 1), devices=(CPU,))
    with pytest.raises(SpecError, match="nodes"):
        Cluster(nodes=())


def test_files_of_clusters_with_an_empty_list_of_links_are_read():
    cluster = cluster_of(ragged(2, 1))
    fields = json.loads(cluster.to_json())
    assert Cluster.from_json(json.dumps({**fields, "links": []})) == cluster
    with pytest.raises(SpecError, match="links: unknown field"):
        Cluster.from_json(json.dumps({**fields, "links": [{"source": 0, "target": 1}]}))
