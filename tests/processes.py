"""Ranks as real processes with the environment torchrun would give them, each running one function of the tests.

They are forked from a server that has torch imported already, so that a rank starts in a moment.
"""

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from evenly.launch.ports import free_port

PRELOADED = ["torch", "torch._dynamo", "torch.nn.parallel", "evenly.session", "tests.session.programs"]


class Rank:
    """A process of one rank: what it returned (through JSON), how it ended, what it wrote to stderr."""

    def __init__(self, target: str, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.process: ForkServerProcess = context.Process(
            target=_run, args=(target, dict(arguments), dict(environment), self.folder.name)
        )
        self.process.start()
        self.errors, self.result = "", None

    @property
    def code(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.join()
        self.folder.cleanup()

    def end(self, limit_s: float) -> bool:
        """Waits for the end and reads what the rank left; returns whether it ended by itself."""
        self.process.join(limit_s)
        in_time = self.process.exitcode is not None
        if not in_time:
            self.process.kill()
            self.process.join()
        self.errors = Path(self.folder.name, "stderr").read_text()
        result = Path(self.folder.name, "result")
        self.result = json.loads(result.read_text()) if result.exists() else None
        self.folder.cleanup()
        return in_time


def start_processes(
    nodes: Sequence[Sequence[int]], target: str, arguments: Mapping[str, Any] | None = None
) -> list[Rank]:
    """Starts one process per rank, each calling `target` ("module:function") with `arguments`."""
    port, world = free_port(), sum(map(len, nodes))
    ranks = []
    for rank in range(world):
        node = next(i for i, members in enumerate(nodes) if rank in members)
        own = {
            "RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_RANK": nodes[node].index(rank),
            "LOCAL_WORLD_SIZE": len(nodes[node]),
            "GROUP_RANK": node,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks.append(Rank(target, arguments or {}, {key: str(value) for key, value in own.items()}))
    return ranks


def collect(ranks: Sequence[Rank], *, limit_s: float = 60.0) -> list[Rank]:
    """Waits for all ranks and reads their results; whoever runs longer than `limit_s` is killed and fails the test."""
    deadline = time.monotonic() + limit_s
    late = [number for number, rank in enumerate(ranks) if not rank.end(max(0.1, deadline - time.monotonic()))]
    assert not late, f"ranks {late} still ran after {limit_s} s: {[rank.errors[-1500:] for rank in ranks]}"
    return list(ranks)


def run_processes(
    nodes: Sequence[Sequence[int]], target: str, arguments: Mapping[str, Any] | None = None, *, limit_s: float = 60.0
) -> list[Any]:
    """Returns what `target` returned on every rank; all must succeed."""
    ranks = collect(start_processes(nodes, target, arguments), limit_s=limit_s)
    assert all(rank.code == 0 for rank in ranks), [(rank.code, rank.errors[-2000:]) for rank in ranks]
    return [rank.result for rank in ranks]


def _run(target: str, arguments: dict[str, Any], environment: dict[str, str], folder: str) -> None:
    import torch

    with Path(folder, "stderr").open("w") as stream:
        os.dup2(stream.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    torch.set_num_threads(1)
    module, function = target.split(":")
    returned = getattr(importlib.import_module(module), function)(**arguments)
    Path(folder, "result").write_text(json.dumps(returned))
