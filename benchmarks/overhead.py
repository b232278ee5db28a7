"""What a tiny step costs around the work itself: the plain loop, DDP and `evenly.synchronize` in turns.

The network is small on purpose, 6 tensors of parameters and well under a millisecond a step: what is left is the
wrapper. Three worlds: one rank; two nodes of one rank each, where no gradient travels; one node of two ranks, which
average gradients through gloo and through shared memory.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Claim, Row, median, spread, write_result
from benchmarks.local_ranks import run_ranks

STEPS = 100  # of a turn
ALONE, TWO_NODES, ONE_NODE = "one rank", "two nodes of one rank", "one node of two ranks"
NODES = {ALONE: [[0]], TWO_NODES: [[0], [1]], ONE_NODE: [[0, 1]]}
Seconds = dict[str, dict[str, list[float]]]  # of a step in each turn, by world and method


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_rank(arguments.worker)
        return
    rounds = 15 if arguments.quick else 60
    seconds: Seconds = {}
    for ranks in (1, 2):
        variables = [{"LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0, "OMP_NUM_THREADS": 1}] * ranks
        seconds |= run_ranks(__file__, "--worker", str(rounds), variables=variables, timeout_s=540)
    report(seconds, save=arguments.save)


def run_rank(rounds: int) -> None:
    """Runs the methods of each world of this size in turns; rank 0 prints their seconds. Ends the process."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import evenly

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds: Seconds = {}
    for world, nodes in NODES.items():
        if sum(map(len, nodes)) != dist.get_world_size():
            continue
        groups = [dist.new_group(ranks) for ranks in nodes]
        group = next(group for group, ranks in zip(groups, nodes, strict=True) if dist.get_rank() in ranks)
        turns = {
            "plain": make_turn(lambda model, optimizer: model),
            "DDP": make_turn(lambda model, optimizer, group=group: DistributedDataParallel(model, process_group=group)),
            "evenly": make_turn(
                lambda model, optimizer, nodes=nodes: evenly.synchronize(model, optimizer, every=10**9, nodes=nodes)
            ),
        }
        measured: dict[str, list[float]] = {name: [] for name in turns}
        names = list(turns)
        for number in range(rounds + 1):
            for place in range(len(names)):
                name = names[(place + number) % len(names)]
                dist.barrier()
                measured[name].append(turns[name](waits=world == ONE_NODE))
        seconds[world] = {name: values[1:] for name, values in measured.items()}
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.barrier()
    os._exit(0)


def make_turn(wrap: Callable[[Any, Any], Any]) -> Callable[..., float]:
    """Returns a function that makes some steps with the wrapped network and returns the seconds of one."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = wrap(model, optimizer)
    x = torch.randn(8, 16)

    def turn(*, waits: bool) -> float:
        """Returns the seconds of a step: of the clock if ranks wait for each other, else of the processor."""
        clock = time.perf_counter if waits else time.process_time  # others may use the machine meanwhile
        began = clock()
        for _ in range(STEPS):
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (clock() - began) / STEPS

    return turn


def report(seconds: Seconds, *, save: bool) -> None:
    """Prints rows and claims as a table and as JSON; with `save` writes them to `results/overhead.json`."""
    rows: list[Row] = [
        {
            "world": world,
            "method": name,
            "ms_per_step": 1e3 * median(values),
            "spread_ms": spread([1e3 * value for value in values]),
            "added_microseconds": 1e6 * _median_of(lambda a, b: a - b, values, of_world["plain"]),
            "over_ddp": _median_of(lambda a, b: a / b, values, of_world["DDP"]),
        }
        for world, of_world in seconds.items()
        for name, values in of_world.items()
    ]
    ours = {row["world"]: row for row in rows if row["method"] == "evenly"}
    claims = [
        Claim("tiny_step_over_ddp", max(row["over_ddp"] for row in ours.values()), 1.0, "lower"),  # in every world
        Claim("added_microseconds_alone", ours[ALONE]["added_microseconds"], 60.0, "lower"),
    ]
    note = (
        f"Three layers of at most 32 x 32, batch 8, {STEPS} steps a turn. Processor seconds, and those of the clock in "
        "one node of two ranks. tiny_step_over_ddp is the largest of the three worlds."
    )
    write_result("overhead", rows, claims, note=note, save=save)


def _median_of(compare: Callable[[float, float], float], values: list[float], others: list[float]) -> float:
    return median([compare(a, b) for a, b in zip(values, others, strict=True)])


if __name__ == "__main__":
    main()
