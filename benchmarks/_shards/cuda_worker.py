"""What each rank of `shards_cuda.py` does: measure its speed beside the others, then run the layouts in turns.

Rank 0 prints one JSON object: the seconds of a step in each turn, the measured speeds, the GPU's multiprocessors.
"""

import json
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from benchmarks._shards.networks import labels_for, network_and_batch
from benchmarks._shards.planned import plan_network
from evenly.comm import rank_group_of
from evenly.graph import trace_module
from evenly.layouts import lay_out
from evenly.session import discover
from evenly.shards import Sharded, join_shards

ALONE, PLANNED = "largest alone", "ours, planned"
STEPS_PER_TURN = 3
MEASURED_STEPS = 5


def run_cuda_rank(name: str, batch_size: int, rounds: int, percent: Sequence[float]) -> None:
    """Runs the network alone on rank 0, then cut evenly, by percentages and by measured speeds, in turns."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, x = network_and_batch(name, batch_size)
    model, x = model.cuda(), x.cuda()
    y = labels_for(batch_size).cuda()
    speeds = _measure_speeds(model, x, y)
    sharded: dict[str, Sharded | None] = {
        **_cut_network(model, x, {"even": [1.0] * len(percent), "typed": list(percent), "ours": speeds})
    }
    sharded[PLANNED] = plan_network(trace_module(model, x), discover(), torch.device("cuda", 0), quick=rounds < 3)
    modules: dict[str, nn.Module | None] = {ALONE: model if rank == 0 else None, **sharded}
    step_seconds: dict[str, list[float]] = {key: [] for key in modules}
    for number in range(rounds + 1):  # the first warms up and is not counted
        for key, module in modules.items():
            began = time.perf_counter()
            _run_steps(module, x, y, STEPS_PER_TURN)
            if number:
                step_seconds[key].append((time.perf_counter() - began) / STEPS_PER_TURN)
    if rank == 0:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        print(json.dumps({"seconds": step_seconds, "speeds": speeds, "processors": processors}), flush=True)
    dist.barrier()
    for sharded_module in sharded.values():
        if sharded_module is not None:
            sharded_module.close()
    dist.destroy_process_group()


def _measure_speeds(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Returns the steps per second of every rank, all running together."""
    _run_steps(model, x, y, 2)
    speed = torch.tensor([MEASURED_STEPS / _run_steps(model, x, y, MEASURED_STEPS)])
    speeds = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(speeds, speed)
    return [float(value) for value in speeds]


def _cut_network(model: nn.Module, example: torch.Tensor, shares_by_name: dict[str, list[float]]) -> dict[str, Sharded]:
    """Returns the network cut by each list of shares; "ours" may cut the batch too."""
    traced = trace_module(model, example)
    return {
        name: join_shards(traced, lay_out(traced.graph, shares, cut_batch=name == "ours"), rank_group=rank_group_of())
        for name, shares in shares_by_name.items()
    }


def _run_steps(module: nn.Module | None, x: torch.Tensor, y: torch.Tensor, count: int) -> float:
    """Returns the seconds of so many forward and backward passes on this rank; ranks begin and end together."""
    torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    if module is not None:
        for _ in range(count):
            nn.functional.cross_entropy(module(x), y).backward()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    dist.barrier()
    return seconds
