"""Nodes are what the ranks' marks say, whatever the order and number of ranks."""

import pytest
import torch
from hypothesis import given

from evenly.launch import Identity
from evenly.spec import Cluster, Device
from evenly.survey import describe_device, survey_cluster
from evenly.survey.discover import _build
from tests.ranks import run_ranks
from tests.spec.values import rank_lists

HERE = {"hostname": "a", "boot_id": "b", "netns": 1, "node_id": "0", "pid": 7}


def mark(**changes) -> Identity:
    return Identity(**{**HERE, **changes})


def build(*marks: Identity) -> Cluster:
    return _build([(each, Device(kind="cpu", cores=rank)) for rank, each in enumerate(marks)])


def test_ranks_with_the_same_marks_are_one_node_whatever_their_process():
    cluster = build(mark(pid=1), mark(pid=2), mark(pid=3))
    assert cluster.rank_lists() == [[0, 1, 2]]
    assert cluster.nodes[0].name == "a"


@pytest.mark.parametrize("changes", [{"boot_id": "c"}, {"netns": 2}, {"node_id": "1"}, {"hostname": "z"}])
def test_one_other_mark_makes_another_node(changes):
    cluster = build(mark(), mark(**changes), mark(), mark(**changes))
    assert cluster.rank_lists() == [[0, 2], [1, 3]]
    names = [node.name for node in cluster.nodes]
    assert names == (["a", "z"] if "hostname" in changes else ["a#1", "a#2"])


def test_unequal_and_interleaved_nodes_come_in_the_order_of_their_first_rank():
    big, small, lone = mark(hostname="big"), mark(hostname="small"), mark(hostname="lone")
    cluster = build(small, big, lone, big, small, big)
    assert cluster.rank_lists() == [[0, 4], [1, 3, 5], [2]]
    assert [node.name for node in cluster.nodes] == ["small", "big", "lone"]
    assert [device.cores for device in cluster.nodes[1].devices] == [1, 3, 5]


def test_only_the_names_that_stand_twice_get_a_number():
    cluster = build(mark(netns=1), mark(hostname="z"), mark(netns=2), mark(netns=3))
    assert [node.name for node in cluster.nodes] == ["a#1", "z", "a#2", "a#3"]


@given(rank_lists())
def test_any_spread_of_ranks_is_found_again(nodes):
    place = {rank: index for index, ranks in enumerate(nodes) for rank in ranks}
    cluster = build(*(mark(hostname=f"h{place[rank]}", pid=rank) for rank in range(len(place))))
    assert sorted(cluster.rank_lists()) == sorted(sorted(ranks) for ranks in nodes)
    assert all(cluster.device_of(rank).cores == rank for rank in place)


def test_the_ranks_tell_each_other_and_all_know_the_same_cluster():
    hosts = ["big", "small", "big", "big"]

    def act(rank_group):
        return survey_cluster(rank_group, mark(hostname=hosts[rank_group.rank]), torch.device("cpu"), timeout_s=20.0)

    first, *others = run_ranks(4, act)
    assert first.rank_lists() == [[0, 2, 3], [1]]
    assert first.device_of(1) == describe_device(torch.device("cpu"))
    assert all(other == first for other in others)


def test_a_rank_alone_is_a_cluster(tmp_path):
    (cluster,) = run_ranks(1, lambda rank_group: survey_cluster(rank_group, mark(), torch.device("cpu")))
    assert cluster.rank_lists() == [[0]]
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


def test_a_cpu_is_described_by_its_memory_and_cores():
    device = describe_device(torch.device("cpu"))
    assert (device.kind, device.index, device.identity) == ("cpu", 0, "")
    assert device.memory_bytes > 2**27
    assert device.cores >= 1


@pytest.mark.gpu
def test_a_gpu_is_described_by_its_name_memory_and_identity():
    device = describe_device(torch.device("cuda"))
    assert (device.kind, device.index) == ("cuda", torch.cuda.current_device())
    assert device.name
    assert device.identity
    assert device.memory_bytes > 2**27
    assert describe_device(torch.device("cuda", device.index)) == device
