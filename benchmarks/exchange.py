"""What crosses the link, and how long a step takes: node-based communications beside torch's own ways.

All methods run in one go on the lab (2 nodes x 2 ranks, 200 Mbit/s): same network, data, steps and period. They take
turns, a few steps each, round after round; figures are medians over rounds. Bytes are read from the link's counter.
The network has 2.0 million parameters and little work per parameter, so that the wire matters on two slow cores.
"""

import argparse
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Claim, median, spread, tell

PERIOD = 8
BATCH = 32


def network() -> nn.Module:
    """Returns two convolutions and two linear layers: 2.0 million parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 640), nn.ReLU(), nn.Linear(640, 10),
    )  # fmt: skip


class Method:
    """One way to train: `model` is called, `step` follows backward."""

    def __init__(self, model: nn.Module, plain: nn.Module, step: Callable[[], None], zero: Callable[[], None]) -> None:
        self.model, self.plain, self.step, self.zero = model, plain, step, zero
        self.seconds: list[float] = []  # of each step's share of a round
        self.sent: list[list[int]] = []  # bytes per node of each round


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def global_ddp(nodes: list[list[int]]) -> Method:
    plain = network()
    optimizer = optimizer_of(plain)
    return Method(nn.parallel.DistributedDataParallel(plain), plain, optimizer.step, optimizer.zero_grad)


def post_local(nodes: list[list[int]], *, hierarchical: bool = False) -> Method:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    plain = network()
    subgroup, _ = dist.new_subgroups_by_enumeration(nodes)
    ddp = nn.parallel.DistributedDataParallel(plain)
    ddp.register_comm_hook(PostLocalSGDState(None, subgroup, start_localSGD_iter=0), post_localSGD_hook)
    if hierarchical:
        periods = OrderedDict([(PERIOD // 2, len(nodes[0])), (PERIOD, sum(map(len, nodes)))])
        averager = HierarchicalModelAverager(period_group_size_dict=periods, warmup_steps=0)
    else:
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(optim=optimizer_of(plain), averager=averager)
    return Method(ddp, plain, optimizer.step, optimizer.zero_grad)


def ours(nodes: list[list[int]], *, every: int | str = PERIOD) -> Method:
    import evenly

    plain = network()
    optimizer = optimizer_of(plain)
    model = evenly.synchronize(plain, optimizer, every=every, nodes=nodes)
    return Method(model, plain, optimizer.step, optimizer.zero_grad)


def methods(nodes: list[list[int]]) -> dict[str, Method]:
    return {
        "global DDP": global_ddp(nodes),
        "post_localSGD": post_local(nodes),
        "hierarchical": post_local(nodes, hierarchical=True),
        "evenly": ours(nodes),
        "evenly, global": ours(nodes, every="global"),
        "no exchange": ours(nodes, every=10**9),
    }


def sent_by_nodes(nodes: list[list[int]]) -> list[int]:
    """Returns the bytes that each node has sent over its link so far; all ranks call it."""
    from evenly.session.ledger import interface_bytes

    dist.barrier()
    time.sleep(0.05)
    rows = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.tensor([interface_bytes()]))
    return [int(rows[ranks[0]]) for ranks in nodes]


def run_round(method: Method, batches: list[tuple[torch.Tensor, torch.Tensor]], nodes: list[list[int]]) -> None:
    before = sent_by_nodes(nodes)
    dist.barrier()
    began = time.perf_counter()
    for x, y in batches:
        loss = nn.functional.cross_entropy(method.model(x), y)
        loss.backward()
        method.step()
        method.zero()
    dist.barrier()
    method.seconds.append((time.perf_counter() - began) / len(batches))
    after = sent_by_nodes(nodes)
    method.sent.append([b - a for a, b in zip(before, after, strict=True)])


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def worker(rounds: int, steps: int) -> None:
    from evenly.recipes.fashion_data import load_fashion

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    import evenly

    nodes = evenly.discover().rank_lists()
    train, test = load_fashion()
    images, labels = train.tensors
    ways = methods(nodes)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    for number in range(rounds + 1):  # the first warms up and is not counted
        batches = []
        for step in range(steps):
            start = ((number * steps + step) * world + rank) * BATCH
            chosen = order[[(start + i) % len(order) for i in range(BATCH)]]
            batches.append((images[chosen], labels[chosen]))
        for method in ways.values():
            run_round(method, batches, nodes)
    size = sum(p.numel() * p.element_size() for p in network().parameters())
    result = {
        name: {
            "seconds": way.seconds[1:],
            "sent": way.sent[1:],
            "accuracy": accuracy(way.plain, test.tensors[0][:2000], test.tensors[1][:2000]),
        }
        for name, way in ways.items()
    }
    if rank == 0:
        print(json.dumps({"parameter_bytes": size, "methods": result}), flush=True)
    dist.barrier()
    for way in ways.values():
        if hasattr(way.model, "close"):
            way.model.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute on two cores")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s of each node's link")
    parser.add_argument("--worker", nargs=2, type=int, metavar=("ROUNDS", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker)
        return
    from evenly.lab import Lab, LabCluster, LabNode

    rounds, steps = (2, PERIOD) if arguments.quick else (6, 2 * PERIOD)
    cluster = LabCluster(nodes=tuple(LabNode(name=f"node{i}", ranks=2, rate_mbit=arguments.rate) for i in range(2)))
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(rounds), str(steps)]
    with Lab(cluster) as lab:
        result = lab.run(command, output="capture", timeout_s=1200)
    result.check()
    told = json.loads(result.stdout[0].strip().splitlines()[-1])
    report(told, rounds=rounds, steps=steps, rate=arguments.rate, save=arguments.save)


def report(told: dict, *, rounds: int, steps: int, rate: float, save: bool) -> None:
    size, ways = told["parameter_bytes"], told["methods"]
    exchanges = steps // PERIOD
    rows = []
    for name, way in ways.items():
        per_step = [sum(sent) / steps for sent in way["sent"]]
        rows.append(
            {
                "method": name,
                "ms_per_step": 1e3 * median(way["seconds"]),
                "spread_ms": spread([1e3 * s for s in way["seconds"]]),
                "mb_across_per_step": median(per_step) / 1e6,
                "times_model_size_per_step": median(per_step) / size,
                "accuracy": way["accuracy"],
            }
        )
    peers = ("global DDP", "post_localSGD", "hierarchical")
    sent = [max(round_) / exchanges for round_ in ways["evenly"]["sent"]]
    theirs = [max(round_) / exchanges for round_ in ways["post_localSGD"]["sent"]]
    ratios = [
        mine / min(ways[peer]["seconds"][number] for peer in peers)
        for number, mine in enumerate(ways["evenly"]["seconds"])
    ]
    claims = [
        Claim("sent_per_exchange_over_parameters", median(sent) / size, 1.08, "lower"),
        Claim("sent_over_post_local", median(sent) / median(theirs), 0.7, "lower"),
        Claim("step_time_over_best_peer", median(ratios), 1.0, "lower"),
    ]
    note = (
        f"2 nodes x 2 ranks, {rate:g} Mbit/s, K' = {PERIOD}, batch {BATCH} a rank, {size / 4e6:.2f} M parameters, "
        f"{rounds} rounds of {steps} steps a method, in turns. 'no exchange' is the limit: the same without exchanges. "
        "Accuracy is that of rank 0's model on 2000 test images after all rounds."
    )
    tell("exchange", rows, claims, note=note, save=save)


if __name__ == "__main__":
    main()
