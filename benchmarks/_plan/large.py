"""How long planning takes for large clusters: ResNet-152 on 1,024 devices, and a simulation of 10,000 nodes."""

import time
from typing import NamedTuple

import torch
from tests.zoo import Bottleneck, ResNet

from benchmarks.common import Row, median
from evenly.graph import trace
from evenly.planner import plan, simulate
from evenly.spec import Cluster, Device, Graph, Node, Profile

REPETITIONS = 3  # of planning
FLOPS_PER_S = 5e13  # of a device with speed 100


class LargeTimes(NamedTuple):
    """Seconds to plan ResNet-152 for 1,024 devices, and to simulate 10,000 nodes for 1,000 steps."""

    plan_s: float
    simulate_s: float


def time_large_clusters() -> LargeTimes:
    """Returns the seconds that planning (the median of three times) and simulating take."""
    network = ResNet(Bottleneck, [3, 8, 36, 3], classes=1000).to("meta")
    graph = trace(network, torch.empty(32, 3, 224, 224, device="meta"))
    return LargeTimes(plan_s=_time_planning(graph), simulate_s=_time_simulation(graph))


def large_row(times: LargeTimes) -> Row:
    """Returns a row with both times in words."""
    planned = f"ResNet-152 for 1,024 devices planned in {times.plan_s:.2f} s"
    return {"cluster": "large", "plan": f"{planned}, 10,000 nodes simulated in {times.simulate_s:.2f} s"}


def _time_planning(graph: Graph) -> float:
    """Returns the median seconds to plan for 128 nodes of 8 devices, half of them slower."""
    cluster = _cluster(128, 8)
    profile = Profile.from_speeds(cluster, graph, [100.0] * 512 + [40.0] * 512, flops_per_s=FLOPS_PER_S)
    seconds = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        plan(cluster, profile, graph, batch_size=32768)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _time_simulation(graph: Graph) -> float:
    """Returns the seconds to simulate 1,000 steps of 10,000 nodes of one device, half of them slower."""
    cluster = _cluster(10_000, 1)
    profile = Profile.from_speeds(cluster, graph, [100.0] * 5000 + [60.0] * 5000, flops_per_s=FLOPS_PER_S)
    chosen = plan(cluster, profile, graph, batch_size=320_000, every=50)
    began = time.perf_counter()
    simulate(chosen, cluster, profile, graph, steps=1000, jitter=0.1)
    return time.perf_counter() - began


def _cluster(num_nodes: int, ranks_per_node: int) -> Cluster:
    """Returns a cluster of equal nodes with devices of 80 GiB."""
    devices = [Device(kind="cuda", memory_bytes=80 * 2**30)] * ranks_per_node
    nodes = [
        Node(name=f"n{i}", ranks=range(i * ranks_per_node, (i + 1) * ranks_per_node), devices=devices)
        for i in range(num_nodes)
    ]
    return Cluster(nodes=nodes)
