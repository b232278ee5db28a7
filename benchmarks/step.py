"""What a small step costs around the work itself: the plain loop, DDP and `evenly.synchronize` in turns.

Two processes, each a node of its own, so that no gradient travels and what is left is the wrapper. The network is small
on purpose: 20 tensors of parameters, about two milliseconds a step. With --node the two processes form one node, and
gradients travel over loopback.
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

STEPS = 50  # of a turn


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--node", action="store_true", help="one node of both processes")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_step_rank(arguments.worker, is_node=arguments.node)
        return
    rounds = 15 if arguments.quick else 60
    options = ["--worker", str(rounds), *(["--node"] if arguments.node else [])]
    variables = [{"LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0, "OMP_NUM_THREADS": 1}] * 2
    seconds = run_ranks(__file__, *options, variables=variables, timeout_s=540)
    report(seconds, is_node=arguments.node, save=arguments.save)


def run_step_rank(rounds: int, *, is_node: bool) -> None:
    """Runs the methods in turns; rank 0 prints the seconds of a step in each round. Ends the process."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import evenly

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    nodes = [[0, 1]] if is_node else [[0], [1]]
    node_group = [dist.new_group(ranks) for ranks in nodes][0 if is_node else dist.get_rank()]
    turns = {
        "plain": make_turn(lambda model, optimizer: model),
        "DDP": make_turn(lambda model, optimizer: DistributedDataParallel(model, process_group=node_group)),
        "evenly": make_turn(lambda model, optimizer: evenly.synchronize(model, optimizer, every=10**9, nodes=nodes)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for number in range(rounds + 1):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            dist.barrier()
            seconds[name].append(turns[name]())
    if dist.get_rank() == 0:
        print(json.dumps({name: values[1:] for name, values in seconds.items()}), flush=True)
    dist.barrier()
    os._exit(0)


def make_turn(wrap: Callable[[Any, Any], Any]) -> Callable[[], float]:
    """Returns a function that makes some steps with the wrapped network and returns the CPU seconds of one."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = wrap(model, optimizer)
    x = torch.randn(32, 64)

    def turn() -> float:
        """Returns the CPU seconds of a step."""
        began = time.process_time()  # of all threads: others may use the machine meanwhile
        for _ in range(STEPS):
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.process_time() - began) / STEPS

    return turn


def report(seconds: dict[str, list[float]], *, is_node: bool, save: bool) -> None:
    """Prints rows and the claim as a table and as JSON; with `save` writes them to `results/step.json`."""
    rows: list[Row] = [
        {
            "method": name,
            "ms_per_step": 1e3 * median(values),
            "spread_ms": spread([1e3 * value for value in values]),
            "over_plain": median([a / b for a, b in zip(values, seconds["plain"], strict=True)]),
            "over_ddp": median([a / b for a, b in zip(values, seconds["DDP"], strict=True)]),
        }
        for name, values in seconds.items()
    ]
    ours = rows[-1]
    claims = [Claim("small_step_over_ddp", ours["over_ddp"], 1.0, "lower")]
    nodes = "one node" if is_node else "two nodes of one rank"
    note = f"Ten layers of 64 x 64, batch 32, {STEPS} steps a turn; {nodes}; processor seconds."
    write_result("step", rows, claims, note=note, save=save)


if __name__ == "__main__":
    main()
