"""What ranks do in processes of their own until one of them dies or hangs."""

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evenly.comm import CollectiveWaiter, FailureMonitor, MemoryGroup, RankGroup, ShardGroup, open_group_inside
from evenly.errors import EvenlyError
from evenly.launch.limits import BoundedStore
from evenly.spec import Device


def move_until_it_fails(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Sums, gathers and scatters tensors of random sizes; returns the error that ended it, and when."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0, wait_for_workers=False)
    rank_group = RankGroup(rank, size, BoundedStore(store, timeout_s=arguments["timeout_s"]), store_rank=0)
    monitor = FailureMonitor(rank_group)
    CollectiveWaiter(monitor, label="start", timeout_s=20).barrier()
    group = open_group_inside(rank_group, "moves", range(size), [Device(kind="cpu")] * size, timeout_s=20)
    assert isinstance(group, MemoryGroup)
    shard_group = ShardGroup(group, monitor, timeout_s=arguments["timeout_s"])
    Path(arguments["folder"], f"ready{rank}").write_text(str(os.getpid()))
    draw, number = random.Random(arguments["seed"]), 0
    segments = [((index, index + 1),) for index in range(size)]
    try:
        while True:
            number += 1
            x = torch.randn(size, draw.choice([1, 100, 100_000, 1_500_000]))
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
