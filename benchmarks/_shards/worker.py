"""What each rank of `shards.py` does: train each layout and the whole network in turns, a step each.

Rank 0 prints one JSON object: the seconds of each step; messages and bytes of the last step, counted and predicted.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

from benchmarks._shards.dtensor import EvenNetwork
from benchmarks._shards.layouts import compared_layouts
from benchmarks._shards.networks import labels_for, network_and_batch
from benchmarks._shards.planned import plan_network
from evenly.comm import rank_group_of
from evenly.graph import Traced, trace_module
from evenly.session import discover
from evenly.shards import Sharded, join_shards

ALONE, PLANNED = "alone", "ours, planned"
DTENSOR = "DTensor, even"
NAMES = (ALONE, "even", "ours", PLANNED, "ours, filters", "published", "ours, without the slowest", DTENSOR)
CPU = torch.device("cpu")
STEPS_OF_TURN = 2
POLL_S = 0.02


class Trainer:
    """Trains one network; `model` is None on ranks that only wait. Keeps the seconds of each step."""

    def __init__(self, model: nn.Module | None) -> None:
        self.step_seconds: list[float] = []
        self._model = model
        if model is not None:
            self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def run_turn(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Makes two training steps and records how long the second takes until all ranks are done.

        The first gets the memory that other methods have given back to the system.
        """
        self._step(x, y)
        dist.barrier()
        began = time.perf_counter()
        self._step(x, y)
        dist.barrier()
        self.step_seconds.append(time.perf_counter() - began)

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self._model is not None:
            nn.functional.cross_entropy(self._model(x), y).backward()
            if isinstance(self._model, EvenNetwork):
                self._model.finish_gradients()
            self._optimizer.step()
            self._optimizer.zero_grad()


def run_shards_rank(
    name: str, batch_size: int, rounds: int, num_methods: int, shares: Sequence[float], folder: Path
) -> None:
    """Trains the first `num_methods` of `NAMES` on this rank; rank 0 prints one JSON object."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, x = network_and_batch(name, batch_size)
    y = labels_for(batch_size)
    traced = trace_module(model, x)
    names = NAMES[1:num_methods]
    sharded = _cut_network(traced, shares, [key for key in names if key not in (PLANNED, DTENSOR)])
    _wait_for_quotas(folder)
    everything: dict[str, Sharded | EvenNetwork | None] = {**sharded}
    if PLANNED in names:
        everything[PLANNED] = plan_network(traced, discover(), CPU, quick=rounds < 2)
    if DTENSOR in names:
        everything[DTENSOR] = EvenNetwork(model)
    trainers = {ALONE: Trainer(model if dist.get_rank() == 0 else None)}
    trainers |= {key: Trainer(module) for key, module in everything.items()}
    counts = {}
    for _ in range(rounds + 1):  # the first warms up and is not counted
        trainers[ALONE].run_turn(x, y)
        for key, module in everything.items():
            if not isinstance(module, Sharded):
                trainers[key].run_turn(x, y)
                continue
            module.traffic.clear()
            bytes_before = _loopback_bytes()
            trainers[key].run_turn(x, y)
            counts[key] = {
                "messages": module.traffic.messages // STEPS_OF_TURN,
                "bytes": module.traffic.sent_bytes // STEPS_OF_TURN,
                "loopback_bytes": (_loopback_bytes() - bytes_before) // STEPS_OF_TURN,
                "predicted_messages": module.layout.messages,
                "predicted_bytes": module.layout.traffic_bytes,
            }
    if dist.get_rank() == 0:
        seconds = {key: trainer.step_seconds[1:] for key, trainer in trainers.items()}
        print(json.dumps({"seconds": seconds, "counts": counts}), flush=True)
    dist.barrier()
    for module in everything.values():
        if isinstance(module, Sharded):
            module.close()
    dist.destroy_process_group()


def _cut_network(traced: Traced, shares: Sequence[float], names: Sequence[str]) -> dict[str, Sharded]:
    """Returns the network cut by each of the layouts with these names."""
    layouts = compared_layouts(traced.graph, shares)
    if dist.get_rank() == 0:
        print(layouts["ours"].explain(), file=sys.stderr, flush=True)
    return {name: join_shards(traced, layouts[name], rank_group=rank_group_of()) for name in names}


def _wait_for_quotas(folder: Path) -> None:
    """Says that this rank is ready, now that torch is loaded and networks are cut, and waits until CPU quotas hold."""
    (folder / f"ready{dist.get_rank()}").touch()
    while not (folder / "go").exists():
        time.sleep(POLL_S)


def _loopback_bytes() -> int:
    """Returns the bytes that the loopback interface has sent."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent
