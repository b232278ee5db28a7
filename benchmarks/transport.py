"""How long moves between ranks of one machine take: shared memory beside gloo, in turns in the same processes.

Every rank is a process with one thread. Each round makes a row of moves over gloo, then a row over shared memory; a
figure is the median over rounds of the mean of a row. `crowded` means more ranks than cores: ranks are then bound to
two cores.

With --cuda, ranks share one GPU under MPS and talk through its memory, or two of them with a third on a CPU through
memory of the host; `reduce` over gloo sends tensors of the GPU, too.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 4 * MIB, 32 * MIB)
MOVES = ("copy", "reduce", "reduce_scatter", "gather_for_ranks", "gather_for_all", "slice")
ROW_BYTES = 24 * MIB  # in each row of a size, about


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="sums of 2 and 4 ranks only, under a minute")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--cuda", action="store_true", help="ranks on one GPU under MPS, and GPUs beside a CPU")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        moves, sizes, rounds, devices = arguments.worker
        run_rank(moves.split(","), [int(size) for size in sizes.split(",")], int(rounds), devices.split(","))
    elif arguments.cuda:
        run_cuda(quick=arguments.quick, save=arguments.save)
    else:
        run_all(quick=arguments.quick, save=arguments.save)


def run_all(*, quick: bool, save: bool) -> None:
    """Runs groups of two, three and four ranks and reports them."""
    from benchmarks.common import Claim, write_result

    moves, rounds = (["reduce"], 7) if quick else (list(MOVES), 15)
    rows = []
    for num_ranks in (2, 4) if quick else (2, 3, 4):
        rows += run_group(num_ranks, moves, rounds)
    ratios = {(row["ranks"], row["move"], row["bytes"]): row["memory_over_gloo"] for row in rows}
    bars = {
        "cpu_allreduce_64kib_over_gloo": ((2, "reduce", 64 * KIB), 0.25),
        "cpu_allreduce_4mib_over_gloo": ((2, "reduce", 4 * MIB), 0.7),
        "cpu_allreduce_32mib_over_gloo": ((2, "reduce", 32 * MIB), 1.0),
        "oversubscribed_1mib_over_gloo": ((4, "reduce", MIB), 0.3),
        "oversubscribed_32mib_over_gloo": ((4, "reduce", 32 * MIB), 1.0),
    }
    claims = [Claim(name, ratios[key], bar, "lower") for name, (key, bar) in bars.items()]
    note = (
        "float32, one thread a rank, ranks bound to two cores. 'reduce' is an all-reduce into a new tensor. The bytes "
        "are those of the whole tensor; parts are equal. CUDA was not measured here."
    )
    write_result("transport", rows, claims, note=note, save=save)


def run_cuda(*, quick: bool, save: bool) -> None:
    """Runs groups of ranks on one GPU, and of two there and one on a CPU, and reports them."""
    from benchmarks.common import Claim, write_result
    from benchmarks.mps import mps_server, rank_variables

    moves, rounds = (["reduce"], 5) if quick else (list(MOVES), 11)
    rows = []
    with mps_server() as folder:
        for devices in (["cuda"] * 2, ["cuda"] * 3, ["cuda"] * 4, ["cuda", "cuda", "cpu"]):
            variables = [rank_variables(folder, percent) for percent in (50, 30, 20, 20)[: len(devices)]]
            rows += run_group(len(devices), moves, rounds, devices=devices, variables=variables)
    ratios = {(row["devices"], row["move"], row["bytes"]): row["memory_over_gloo"] for row in rows}
    bars = {
        "cuda_ipc_allreduce_4mib_over_gloo": (("cuda,cuda,cuda", "reduce", 4 * MIB), 0.05),
        "mixed_allreduce_4mib_over_gloo": (("cuda,cuda,cpu", "reduce", 4 * MIB), 0.5),
    }
    claims = [Claim(name, ratios[key], bar, "lower") for name, (key, bar) in bars.items()]
    note = (
        "float32; ranks on one GPU with 50, 30, 20 and 20 % of its multiprocessors. 'reduce' is an all-reduce into a "
        "new tensor. The bytes are those of the whole tensor; parts are equal."
    )
    write_result("transport_cuda", rows, claims, note=note, save=save)


def run_group(
    num_ranks: int,
    moves: list[str],
    rounds: int,
    *,
    devices: Sequence[str] = (),
    variables: Sequence[Mapping[str, object]] = (),
) -> list[dict[str, Any]]:
    """Returns the figures of a group of so many ranks, on CPUs unless `devices` are given; two cores are for all."""
    from benchmarks.common import median, spread
    from benchmarks.local_ranks import run_ranks

    sizes = ",".join(map(str, SIZES))
    devices = devices or ["cpu"] * num_ranks
    variables = variables or [{"OMP_NUM_THREADS": 1} for _ in range(num_ranks)]
    options = ["--worker", ",".join(moves), sizes, str(rounds), ",".join(devices)]
    timings = run_ranks(__file__, *options, variables=variables, timeout_s=900)
    rows = []
    for timing in timings:
        gloo, memory = timing["gloo_s"], timing["memory_s"]
        ratios = [b / a for a, b in zip(gloo, memory, strict=True)]
        rows.append(
            {
                "ranks": num_ranks,
                **({"devices": ",".join(devices)} if "cuda" in devices else {"crowded": num_ranks > 2}),
                "move": timing["move"],
                "bytes": timing["bytes"],
                "gloo_ms": 1000 * median(gloo),
                "memory_ms": 1000 * median(memory),
                "memory_over_gloo": median(ratios),
                "spread": spread(ratios),
            }
        )
    return rows


def run_rank(moves: list[str], sizes: list[int], rounds: int, devices: list[str]) -> None:
    """Times the moves on this rank; rank 0 prints a JSON list."""
    import json

    import torch
    import torch.distributed as dist

    from evenly.comm import FailureMonitor, MemoryGroup, ShardGroup, open_group, open_group_inside, rank_group_of

    if "cuda" not in devices:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank_group = rank_group_of()
    monitor, ranks = FailureMonitor(rank_group), range(rank_group.size)
    gloo = open_group(rank_group, "gloo", ranks, backend="gloo", timeout_s=60)
    device = torch.device(devices[rank_group.rank], 0)
    memory = open_group_inside(rank_group, "memory", ranks, None, timeout_s=60, device=device)
    if not isinstance(memory, MemoryGroup):
        raise SystemExit("the ranks of this machine cannot share memory")
    wanted = "host" if "cpu" in devices else "device"
    if memory.place(torch.empty(0, device=device)) != wanted:
        raise SystemExit(f"the ranks do not share memory of the {wanted}")
    groups = {"gloo_s": ShardGroup(gloo, monitor), "memory_s": ShardGroup(memory, monitor)}
    timings = []
    for move in moves:
        for size in sizes:
            works = {key: move_of(shard_group, move, size, device) for key, shard_group in groups.items()}
            repeats = max(1, min(100, ROW_BYTES // size))
            seconds: dict[str, list[float]] = {key: [] for key in works}
            for number in range(rounds + 1):
                for key, work in works.items():
                    dist.barrier()
                    row_s = time_row(work, repeats)
                    if number:  # the first warms up
                        seconds[key].append(row_s)
            timings.append({"move": move, "bytes": size, **seconds})
    if rank_group.rank == 0:
        print(json.dumps(timings), flush=True)
    dist.barrier()
    for shard_group in groups.values():
        shard_group.close()
    dist.destroy_process_group()


def move_of(shard_group: Any, name: str, size: int, device: Any) -> Callable[[], object]:
    """Returns a move, or the way back of one whose way there sends nothing, of a tensor [32, channels, 64]."""
    import torch

    from evenly.comm import Redistribute, take

    channels = size // (4 * 32 * 64)
    edges = [channels * rank // shard_group.size for rank in range(shard_group.size + 1)]
    segments = [((edges[rank], edges[rank + 1]),) for rank in range(shard_group.size)]
    whole = torch.randn(32, channels, 64, device=device)
    move = Redistribute(shard_group, name, 1, segments)
    part = take(whole, 1, segments[shard_group.rank])
    match name:
        case "copy":
            return lambda: move.backward(whole).wait()
        case "slice":
            return lambda: move.backward(part).wait()
        case "reduce" | "reduce_scatter":
            return lambda: move.forward(whole).wait()
        case _:
            return lambda: move.forward(part).wait()


def time_row(work: Callable[[], object], repeats: int) -> float:
    """Returns the mean seconds of a move in a row of them, of which a GPU has completed the last."""
    import torch

    began = time.perf_counter()
    for _ in range(repeats):
        work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


if __name__ == "__main__":
    main()
