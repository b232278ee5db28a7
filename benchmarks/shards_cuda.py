"""Layers cut over unequal CUDA devices: three processes on one GPU, made unequal with CUDA MPS, beside one alone.

Each process may use a percentage of the GPU's multiprocessors (70/25/5 or 50/30/20). Speeds are not the percentages, so
"ours" takes shares from a short measurement of each process, all running together; "typed" takes the percentages. Ranks
talk over gloo through host memory, as NCCL refuses several ranks on one GPU: figures are pessimistic about the wire.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Claim, median, spread, write_result

WAYS = ("largest alone", "even", "typed", "ours")


def worker(name: str, batch: int, rounds: int, percent: Sequence[float]) -> None:  # noqa: PLR0915
    import torch
    import torch.distributed as dist
    from torch import nn

    from benchmarks.shards import case
    from evenly.comm import party_of
    from evenly.graph import follow
    from evenly.planner import lay_out
    from evenly.shards import join_shards

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, x = case(name, batch)
    model, x = model.cuda(), x.cuda()
    y = torch.randint(10, (batch,), generator=torch.Generator().manual_seed(1)).cuda()  # the same on every rank

    def step(module: nn.Module) -> None:
        nn.functional.cross_entropy(module(x), y).backward()

    def seconds_of(module: nn.Module | None, count: int) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count if module is not None else 0):
            step(module)
        torch.cuda.synchronize()
        mine = time.perf_counter() - began
        dist.barrier()
        return mine / count

    seconds_of(model, 2)
    speed = torch.tensor([1.0 / seconds_of(model, 5)])  # all together
    speeds = [torch.zeros(1) for _ in percent]
    dist.all_gather(speeds, speed)
    measured = [float(s) for s in speeds]
    traced = follow(model, x)
    shares = {"even": [1.0] * len(percent), "typed": list(percent), "ours": measured}
    modules = {"largest alone": model if rank == 0 else None}
    for key, values in shares.items():
        layout = lay_out(traced.graph, values, cut_batch=key == "ours")
        modules[key] = join_shards(traced, layout, party=party_of())
    times: dict[str, list[float]] = {key: [] for key in WAYS}
    for number in range(rounds + 1):
        for key in WAYS:
            began = time.perf_counter()
            seconds_of(modules[key], 3)
            if number:
                times[key].append((time.perf_counter() - began) / 3)
    if rank == 0:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        print(json.dumps({"seconds": times, "speeds": measured, "processors": processors}), flush=True)
    dist.barrier()
    for key in ("even", "typed", "ours"):
        modules[key].close()
    dist.destroy_process_group()


def run(name: str, batch: int, rounds: int, percent: Sequence[float], folder: str) -> dict:
    """Returns what rank 0 tells; the MPS server must be up."""
    from evenly.launch.ports import free_port

    port = free_port()
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", name, str(batch), str(rounds)]
    command.append(",".join(map(str, percent)))
    processes = []
    for rank, share in enumerate(percent):
        own = {"RANK": rank, "WORLD_SIZE": len(percent), "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
        own |= {"MASTER_PORT": port, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": int(share)}
        own |= {"OMP_NUM_THREADS": 2, "GLOO_SOCKET_IFNAME": "lo"}
        environment = {**os.environ, **{key: str(value) for key, value in own.items()}}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    texts = [process.communicate(timeout=400)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank failed: {[process.returncode for process in processes]}")
    return json.loads(texts[0].strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--worker", nargs=4, metavar=("NET", "BATCH", "ROUNDS", "PERCENT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, batch, rounds, percent = arguments.worker
        worker(name, int(batch), int(rounds), [float(p) for p in percent.split(",")])
        return
    rounds = 2 if arguments.quick else 6
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        server = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=server, check=True)
        try:
            for name, batch in (("cifar", 512), ("wide", 2048)):
                for percent in ((70, 25, 5), (50, 30, 20)):
                    told = run(name, batch, rounds, percent, folder)
                    rows += rows_of(name, batch, percent, told)
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=server, check=False)
    by = {(row["network"], row["percent"], row["way"]): row["ms_per_step"] for row in rows}
    uneven = by["cifar", "70/25/5", "even"] / by["cifar", "70/25/5", "ours"]
    wide = by["wide", "50/30/20", "even"] / by["wide", "50/30/20", "ours"]
    claims = [
        Claim("speedup_over_even_70_25_5_cuda", uneven, 1.0, "higher"),
        Claim("speedup_over_even_wide_50_30_20_cuda", wide, 1.0, "higher"),
    ]
    note = "Ranks share one GPU and talk through host memory; speeds measured with all processes running together."
    write_result("shards_cuda", rows, claims, note=note, save=arguments.save)


def rows_of(name: str, batch: int, percent: Sequence[float], told: dict) -> list[dict]:
    alone = median(told["seconds"]["largest alone"])
    return [
        {
            "network": name,
            "percent": "/".join(map(str, percent)),
            "way": way,
            "ms_per_step": 1e3 * median(values),
            "spread_ms": spread([1e3 * value for value in values]),
            "samples_per_s": batch / median(values),
            "speedup_over_largest_alone": alone / median(values),
            "measured_speeds": "/".join(f"{speed:.1f}" for speed in told["speeds"]),
        }
        for way, values in told["seconds"].items()
    ]


if __name__ == "__main__":
    main()
