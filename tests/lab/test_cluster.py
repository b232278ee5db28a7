"""A cluster is a value; its file says what is wrong with it."""

import pytest

from evenly.errors import LabError, SpecError
from evenly.lab import LabCluster, LabNode, load_cluster
from evenly.lab._fit import check_fit
from evenly.lab.cluster import shipped_clusters

TWO_CORES = frozenset({0, 1})


def test_nodes_without_a_name_are_numbered():
    cluster = LabCluster(nodes=[LabNode(), LabNode(name="slow", ranks=3), LabNode()])
    assert [node.name for node in cluster.nodes] == ["node0", "slow", "node2"]
    assert cluster.world_size == 5


def test_a_cluster_survives_json():
    cluster = LabCluster(nodes=[LabNode(ranks=2, cpu=[0.8, 0.4], rate_mbit=50), LabNode(cpu=0.2, cores="0-1")])
    assert LabCluster.from_json(cluster.to_json()) == cluster
    assert [cluster.nodes[0].cpu_of(rank) for rank in range(2)] == [0.8, 0.4]
    assert cluster.nodes[1].cpu_of(0) == 0.2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[nodes]]\nranks = 1\ncolour = 'red'", r"nodes\.0\.colour: unknown field"),
        ("[[nodes]]\n[[nodes]]\nranks = 0", r"nodes\.1\.ranks: .*greater than or equal to 1"),
        ("[[nodes]]\nrate_mbit = 0", r"nodes\.0\.rate_mbit: .*greater than 0"),
        ("[[nodes]]\ncpu = 0.0001", r"nodes\.0\.cpu.*0\.001"),
        ("[[nodes]]\nranks = 3\ncpu = [0.5, 0.5]", r"nodes\.0: cpu has 2 numbers for 3 ranks"),
        ("[[nodes]]\ncores = '3-1'", r"nodes\.0\.cores: a core set is"),
        ("[[nodes]]\nname = 'no_good'", r"nodes\.0\.name"),
        ("[[nodes]]\nname = 'a'\n[[nodes]]\nname = 'a'", "two nodes are called 'a'"),
        ("nodes = []", "nodes: .*at least 1"),
        ("speed = 3\n[[nodes]]", "speed: unknown field"),
        ("nodes = [", "not valid TOML"),
    ],
)
def test_a_bad_file_names_itself_and_the_field(tmp_path, text, complaint):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=complaint) as caught:
        load_cluster(path)
    assert str(path) in str(caught.value)


def test_a_cluster_that_is_not_there_names_those_that_are():
    with pytest.raises(SpecError, match="demo, three-one, two-by-two"):
        load_cluster("nowhere")


@pytest.mark.parametrize("name", shipped_clusters())
def test_shipped_clusters_fit_two_cores(name):
    cluster = load_cluster(name)
    check_fit(cluster, online=TWO_CORES)
    assert len(cluster.nodes) >= 2


@pytest.mark.parametrize(
    ("node", "complaint"),
    [
        (LabNode(ranks=3, cpu=0.7), r"promised 2\.1 cores' worth .* this machine has 2 cores.* Lower `cpu`"),
        (LabNode(cpu=1.5, cores="0"), r"ranks of node0 are promised 1\.5 .* core set 0 has 1 cores"),
        (LabNode(cores="0-3"), r"node0 is to run on cores 0-3, but this machine has only \[0, 1\]"),
    ],
)
def test_more_cpu_than_there_is_is_refused(node, complaint):
    with pytest.raises(LabError, match=complaint):
        check_fit(LabCluster(nodes=[node]), online=TWO_CORES)


def test_a_folder_does_not_hide_a_cluster_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert load_cluster("demo").world_size == 3
