"""A cluster of three ranks on two nodes, a small network, and plans for them, without torch."""

from evenly.planner import plan, simulate
from evenly.spec import Cluster, Device, Forecast, Graph, Layer, Node, Plan, Profile, Rate, Tensor


def cluster_of(*sizes: int) -> Cluster:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    cpu = Device(kind="cpu", cores=1)
    nodes = [
        Node(name=f"host{index}", ranks=range(start, start + size), devices=[cpu] * size)
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    return Cluster(nodes=nodes)


def layer_of(name: str, op: str, kind: str, *inputs: str, shape: tuple[int, ...], flops: int = 0) -> Layer:
    out = Tensor(name=name, shape=shape, dtype="float32", has_grad=op != "input")
    return Layer(name=name, op=op, kind=kind, where=name, inputs=inputs, outputs=(out,), flops=flops)


def graph_of(batch: int = 100) -> Graph:
    """Two linear layers of 1 GFlop a batch."""
    return Graph(
        model="Two",
        layers=(
            layer_of("x", "input", "source", shape=(batch, 64)),
            layer_of("first.weight", "parameter", "source", shape=(128, 64)),
            layer_of("first", "linear", "mixing", "x", "first.weight", shape=(batch, 128), flops=5 * 10**8),
            layer_of("second.weight", "parameter", "source", shape=(64, 128)),
            layer_of("second", "linear", "mixing", "first", "second.weight", shape=(batch, 64), flops=5 * 10**8),
        ),
    )


def profile_of(cluster: Cluster, speeds: list[float], graph: Graph) -> Profile:
    across = Rate(latency_s=1e-2, bytes_per_s=1e8)
    return Profile.from_speeds(cluster, graph, speeds, flops_per_s=1e10, across=across)


def planned(*sizes: int, speeds: list[float], **wishes) -> tuple[Plan, Forecast, Cluster]:
    cluster, graph = cluster_of(*sizes), graph_of()
    profile = profile_of(cluster, speeds, graph)
    made = plan(cluster, profile, graph, cut=False, **wishes)
    return made, simulate(made, cluster, profile, graph, steps=100), cluster
