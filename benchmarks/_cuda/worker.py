"""What each rank of `cuda.py` does. Rank 0 prints one JSON object."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._cuda.networks import CASES
from benchmarks._cuda.parts import PARTS
from benchmarks._cuda.trainer import Trainer
from evenly.exchange.codecs import find_codec

CODED = {"cuda": 1 << 28, "cpu": 1 << 22}  # values of a vector
REPEATS = 20


def run_part(name: str, *, quick: bool) -> None:
    """Trains by all methods of a part in turns; rank 0 prints what each of them took. Ends the process."""
    dist.init_process_group("gloo")
    part = PARTS[name]
    is_small = quick and not torch.cuda.is_available()
    case = CASES["small"] if is_small else CASES[part.network]
    case = replace(case, is_compiled=CASES[part.network].is_compiled and not is_small)
    rounds, steps = (2, min(part.steps, 20)) if quick else (part.rounds, part.steps)
    own_node = next(ranks for ranks in part.nodes if dist.get_rank() in ranks)
    group = dist.new_group(own_node, backend="nccl" if len(own_node) == 1 and torch.cuda.is_available() else "gloo")
    trainers = {
        method: Trainer(case, method, settings=settings, nodes=part.nodes, group=group)
        for method, settings in part.methods.items()
    }
    order = list(trainers.values())
    for trainer in order:
        trainer.run_round(steps)
    for number in range(rounds):
        for place in range(len(order)):
            order[(place + number) % len(order)].run_round(steps)
    if dist.get_rank() == 0:
        figures = {method: _figures(trainer) for method, trainer in trainers.items()}
        print(json.dumps({"network": "small" if is_small else part.network, "methods": figures}), flush=True)
    dist.barrier()
    os._exit(0)


def run_codecs() -> None:
    """Prints the seconds of encoding and decoding a vector, and of copying one on the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = CODED[device]
    values = torch.randn(size, device=device)
    copy = torch.empty_like(values)
    figures = {"copy": {"seconds": _seconds(lambda: copy.copy_(values)), "bytes": 2 * values.nbytes}}
    for name in ("bf16", "int8", "int4"):
        codec = find_codec(name)
        if codec is None:
            continue
        code = codec.encode(values)
        moved = values.nbytes + code.nbytes
        figures[f"{name}, encode"] = {"seconds": _seconds(lambda codec=codec: codec.encode(values)), "bytes": moved}
        figures[f"{name}, decode"] = {
            "seconds": _seconds(lambda codec=codec, code=code: codec.decode(code, size)),
            "bytes": moved,
        }
    print(json.dumps(figures), flush=True)


def _figures(trainer: Trainer) -> dict[str, Any]:
    merged = trainer.exchanges[1:]  # the first one warms up
    return {
        "step_s": trainer.step_seconds[1:],
        "exchange_s": [done.seconds for done in merged],
        "waited_s": [done.waited_s for done in merged],
        "sent_bytes": [done.sent_bytes for done in merged],
        "peak_bytes": trainer.peak_bytes,
        "parameter_bytes": trainer.parameter_bytes,
    }


def _seconds(act: Callable[[], object]) -> list[float]:
    """Returns the seconds of each of several calls, which wait for the device."""
    seconds = []
    for _ in range(REPEATS + 3):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        act()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[3:]
