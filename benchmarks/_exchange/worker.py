"""What each rank of `exchange.py` does: run the methods in turns; rank 0 prints times, bytes and accuracy."""

import json
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import evenly
from benchmarks._exchange.method import PERIOD, Method, Nodes
from benchmarks._exchange.methods import SLOW, MethodSet, methods_of, package_versions
from benchmarks._exchange.networks import busy_network, network
from evenly.recipes.data import load_images
from evenly.session.run_clock import machine_bytes

NUM_TESTED = 2000  # images
SETTLE_S = 0.05  # for the link's counter to catch up
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RankData:
    """The training images of one rank, in an order that is the same for every method."""

    images: torch.Tensor  # [N, 1, 28, 28]
    labels: torch.Tensor  # [N]
    order: torch.Tensor  # [N], indices
    batch_size: int

    def batches(self, first_step: int, num_steps: int) -> list[Batch]:
        """Returns this rank's batches of some steps; the data begin anew at their end."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        batches = []
        for step in range(first_step, first_step + num_steps):
            start = (step * world_size + rank) * self.batch_size
            indices = self.order[[(start + i) % len(self.order) for i in range(self.batch_size)]]
            batches.append((self.images[indices], self.labels[indices]))
        return batches


def run_exchange_rank(rounds: int, steps: int, method_set: MethodSet, batch_size: int) -> None:
    """Runs all methods of a set on this rank; rank 0 prints one JSON object."""
    dist.init_process_group("gloo")
    nodes = evenly.discover().rank_lists()
    train, test = load_images("fashion", None).normalised()
    images, labels = train.tensors
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    data = RankData(images, labels, order, batch_size)
    factories = methods_of(method_set, batch_size)
    make_network = network if method_set == "short" else busy_network
    # Methods of one group take turns. Hivemind would go on in the turns of others, so there each has its own group.
    groups = [[name] for name in factories] if method_set == "apart" else [list(factories)]
    methods: dict[str, Method] = {}
    for group in groups:
        own_methods = {name: factories[name](nodes, make_network()) for name in group}
        methods |= own_methods
        _run_group(own_methods, data, nodes, rounds=rounds, steps=steps, method_set=method_set)
    figures = {
        name: {
            "seconds": method.step_seconds[1:],  # without the round that warms up
            "sent": method.sent_bytes[1:],
            "accuracy": _accuracy(method.plain, test.tensors[0][:NUM_TESTED], test.tensors[1][:NUM_TESTED]),
        }
        for name, method in methods.items()
    }
    if dist.get_rank() == 0:
        parameter_bytes = sum(p.numel() * p.element_size() for p in make_network().parameters())
        printed = {"parameter_bytes": parameter_bytes, "batch": batch_size, "methods": figures}
        print(json.dumps(printed | {"versions": package_versions()}), flush=True)
    dist.barrier()
    for method in methods.values():
        method.close()
    dist.destroy_process_group()


def _run_group(
    methods: dict[str, Method], data: RankData, nodes: Nodes, *, rounds: int, steps: int, method_set: MethodSet
) -> None:
    """Runs some methods in turns, after a round in which each warms up."""
    for method in methods.values():  # a period, and the steps in which its exchange completes
        _run_round(method, data.batches(0, PERIOD + method.overlap_steps), nodes)
    for number in range(1, rounds + 1):
        for name, method in methods.items():
            num_steps = PERIOD if method_set == "full" and name in SLOW else steps
            _run_round(method, data.batches(number * steps, num_steps), nodes)


def _run_round(method: Method, batches: list[Batch], nodes: Nodes) -> None:
    """Makes a step for each batch and records the seconds of one and the bytes that each node sent."""
    sent_before = _sent_by_nodes(nodes)
    dist.barrier()
    began = time.perf_counter()
    for x, y in batches:
        nn.functional.cross_entropy(method.model(x), y).backward()
        method.step()
        method.zero_grad()
    dist.barrier()
    method.step_seconds.append((time.perf_counter() - began) / len(batches))
    sent_after = _sent_by_nodes(nodes)
    method.sent_bytes.append([after - before for before, after in zip(sent_before, sent_after, strict=True)])


def _sent_by_nodes(nodes: Nodes) -> list[int]:
    """Returns the bytes that each node has sent over its link so far; all ranks call it."""
    dist.barrier()
    time.sleep(SETTLE_S)
    counters = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counters, torch.tensor([machine_bytes()]))
    return [int(counters[ranks[0]]) for ranks in nodes]


@torch.no_grad()
def _accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the fraction of images that the model classifies correctly."""
    return float((model(images).argmax(1) == labels).float().mean())
