"""What ranks do in processes of their own until one of them dies or hangs."""

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evenly.comm import (
    CollectiveWaiter,
    FailureMonitor,
    MemoryGroup,
    RankGroup,
    ShardGroup,
    open_group,
    open_group_inside,
)
from evenly.errors import EvenlyError
from evenly.launch.limits import BoundedStore


def open_world(timeout_s: float) -> tuple[RankGroup, FailureMonitor]:
    """Returns the ranks of the launcher, once all are there."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0, wait_for_workers=False)
    rank_group = RankGroup(rank, size, BoundedStore(store, timeout_s=timeout_s), store_rank=0)
    monitor = FailureMonitor(rank_group)
    CollectiveWaiter(monitor, label="start", timeout_s=60).barrier()
    return rank_group, monitor


def move_until_it_fails(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Sums, gathers and scatters tensors of random sizes; returns the error that ended it, and when."""
    rank_group, monitor = open_world(arguments["timeout_s"])
    rank, size = rank_group.rank, rank_group.size
    device = torch.device(arguments["devices"][rank])
    if device.type == "cuda" or "cuda:0" in arguments["devices"]:
        os.environ["EVENLY_SHARED_MEMORY"] = "gpu"
    group = open_group_inside(rank_group, "moves", range(size), None, timeout_s=20, device=device)
    assert isinstance(group, MemoryGroup)
    shard_group = ShardGroup(group, monitor, timeout_s=arguments["timeout_s"])
    segments = [((index, index + 1),) for index in range(size)]
    warm = torch.randn(size, 10, device=device)  # a device loads the code of an operation at its first use
    shard_group.sum(warm).wait()
    shard_group.gather(warm[:1], 0, segments).wait()
    shard_group.scatter_sum(warm, 0, segments).wait()
    Path(arguments["folder"], f"ready{rank}").write_text(str(os.getpid()))
    draw, number = random.Random(arguments["seed"]), 0
    try:
        while True:
            number += 1
            x = torch.randn(size, draw.choice([1, 100, 100_000, 1_500_000]), device=device)
            match draw.randrange(3):
                case 0:
                    shard_group.sum(x).wait()
                case 1:
                    shard_group.gather(x[:1], 0, segments).wait()
                case 2:
                    shard_group.scatter_sum(x, 0, segments).wait()
    except EvenlyError as error:
        found = {"error": type(error).__name__, "text": str(error), "at_s": time.monotonic(), "moves": number}
    shard_group.close()
    del shard_group, group
    return {**found, "mapped": Path("/proc/self/maps").read_text().count("memfd:evenly")}


def compare_random_moves(arguments: Mapping[str, Any]) -> int:
    """Makes random moves over gloo and over shared memory, with a device for each rank; returns how many."""
    from tests.comm.memory.test_random_moves import compare_one

    rank_group, monitor = open_world(60.0)
    os.environ["EVENLY_SHARED_MEMORY"] = "gpu"
    device = torch.device(arguments["devices"][rank_group.rank])
    ranks = range(rank_group.size)
    gloo = ShardGroup(open_group(rank_group, "gloo", ranks, backend="gloo", timeout_s=60), monitor, timeout_s=60)
    group = open_group_inside(rank_group, "moves", ranks, None, timeout_s=60, device=device)
    assert isinstance(group, MemoryGroup)
    assert group.place(torch.empty(0, device=device)) == arguments["place"]
    memory = ShardGroup(group, monitor, timeout_s=60)
    for number in range(arguments["count"]):
        compare_one(random.Random(f"{arguments['seed']} {number}"), gloo, memory, device)
    count = memory.traffic.messages
    assert count == gloo.traffic.messages
    memory.close()
    gloo.close()
    return count


def use_streams(arguments: Mapping[str, Any]) -> list[float]:
    """Sums in one stream what another has computed, several sums at a time; returns what differs."""
    os.environ["EVENLY_SHARED_MEMORY"] = "gpu"
    rank_group, monitor = open_world(60.0)
    device = torch.device("cuda", 0)
    group = open_group_inside(rank_group, "moves", range(rank_group.size), None, timeout_s=60, device=device)
    shard_group = ShardGroup(group, monitor, timeout_s=60)
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    differences = []
    for number in range(arguments["count"]):
        pending = []
        for index, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                x = torch.full((1 << (10 + 3 * index),), float(number + index + rank_group.rank), device=device)
                for _ in range(20):
                    x = x * 2 - x  # still busy when the sum is started
                pending.append((x, stream, shard_group.sum(x)))
        totals = []
        for index, (_, _, work) in reversed(list(enumerate(pending))):
            with torch.cuda.stream(streams[index - 1]):  # another one than it was started on
                totals.append((index, work.wait() + 0))
        torch.cuda.synchronize(device)
        for index, total in totals:
            expected = sum(number + index + rank for rank in range(rank_group.size))
            differences.append(float((total - expected).abs().max()))
    shard_group.close()
    return differences
