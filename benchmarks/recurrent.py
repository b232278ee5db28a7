"""One recurrent layer on two ranks: whole on both, cut along the batch, cut by units, and what the search chooses.

Two processes with equal shares run forward and backward of the same layer in turns. They talk over gloo; with --cuda
both compute on GPUs, or on one GPU. What is chosen comes from the default costs, without a measured profile.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Claim, Row, median, spread, write_result
from benchmarks.local_ranks import run_ranks

CASES = {  # kind, samples, steps, units
    "few samples, many units": ("LSTM", 8, 32, 1024),
    "GRU, few samples, many units": ("GRU", 8, 32, 1024),
    "many samples and units": ("LSTM", 32, 32, 1024),
    "many steps": ("LSTM", 32, 64, 512),
    "few units": ("LSTM", 8, 32, 256),
}
QUICK = ("few samples, many units", "few units")
METHODS = {"whole": "whole", "along the batch": "bystander", "by units": "units"}  # the modes of a layout


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--cuda", action="store_true", help="compute on GPUs")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "ROUNDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_recurrent_rank(arguments.worker[0], int(arguments.worker[1]), on_cuda=arguments.cuda)
        return
    rows: list[Row] = []
    for name in QUICK if arguments.quick else CASES:
        options = ["--worker", name, "5" if arguments.quick else "15", *(["--cuda"] if arguments.cuda else [])]
        figures = run_ranks(__file__, *options, variables=[{"OMP_NUM_THREADS": 1}] * 2, timeout_s=300)
        rows += rows_of(name, figures)
    report(rows, on_cuda=arguments.cuda, save=arguments.save)


def run_recurrent_rank(name: str, rounds: int, *, on_cuda: bool) -> None:
    """Runs the methods in turns; rank 0 prints the seconds of each and the mode that is chosen. Ends the process."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from evenly.comm import rank_group_of
    from evenly.graph import trace_module
    from evenly.layouts import TransferCosts, lay_out
    from evenly.shards import join_shards
    from evenly.spec import Device

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    device = torch.device(f"cuda:{dist.get_rank() % torch.cuda.device_count()}" if on_cuda else "cpu")
    kind, samples, steps, units = CASES[name]
    torch.manual_seed(0)
    model = nn.Sequential(getattr(nn, kind)(units, units, batch_first=True)).to(device)
    x = torch.randn(samples, steps, units, device=device)
    traced, rank_group = trace_module(model, x), rank_group_of()
    networks = {
        method: join_shards(traced, lay_out(traced.graph, [1, 1], modes={"recurrent": [mode]}), rank_group=rank_group)
        for method, mode in METHODS.items()
    }
    rates = TransferCosts.of_devices([Device(kind="cuda" if on_cuda else "cpu")])
    default = lay_out(traced.graph, [1, 1], rates=rates)
    chosen = next(choice.mode for choice in default.choices if choice.op == "recurrent")
    seconds: dict[str, list[float]] = {method: [] for method in networks}
    names = list(networks)
    for number in range(rounds + 1):
        for place in range(len(names)):
            method = names[(place + number) % len(names)]
            dist.barrier()
            began = time.perf_counter()
            networks[method](x)[0].square().mean().backward()
            if on_cuda:
                torch.cuda.synchronize()
            dist.barrier()
            seconds[method].append(time.perf_counter() - began)
            networks[method].zero_grad()
    if dist.get_rank() == 0:
        messages = {method: network.layout.messages for method, network in networks.items()}
        timed = {method: values[1:] for method, values in seconds.items()}
        by_mode = {mode: method for method, mode in METHODS.items()}
        print(json.dumps({"seconds": timed, "messages": messages, "chosen": by_mode[chosen]}), flush=True)
    dist.barrier()
    os._exit(0)


def rows_of(name: str, figures: dict[str, Any]) -> list[Row]:
    """Returns a row for each method of one case."""
    kind, samples, steps, units = CASES[name]
    seconds: dict[str, list[float]] = figures["seconds"]
    return [
        {
            "case": name,
            "layer": f"{kind}, {samples} x {steps} x {units}",
            "method": method,
            "ms": 1e3 * median(values),
            "spread_ms": spread([1e3 * value for value in values]),
            "messages": figures["messages"][method],
            "speedup_over_whole": median([a / b for a, b in zip(seconds["whole"], values, strict=True)]),
            "chosen": "chosen" if method == figures["chosen"] else "",
        }
        for method, values in seconds.items()
    ]


def report(rows: list[Row], *, on_cuda: bool, save: bool) -> None:
    """Prints rows and claims as a table and as JSON; with `save` writes them to `results/`."""
    by_units = next(row for row in rows if row["method"] == "by units")
    claims = [Claim("recurrent_units_speedup_over_whole", by_units["speedup_over_whole"], 1.0, "higher")]
    where = "GPUs, gloo" if on_cuda else "CPU, one thread each, gloo"
    note = f"Forward and backward of one layer with as many features as units; two ranks with equal shares; {where}."
    write_result("recurrent_cuda" if on_cuda else "recurrent", rows, claims, note=note, save=save)


if __name__ == "__main__":
    main()
