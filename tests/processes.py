"""Ranks as real processes with the environment torchrun would give them, each running one function of the tests."""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "result: "


@dataclass
class Rank:
    """A process of one rank: what it returned (through JSON), how it ended, what it wrote."""

    process: subprocess.Popen[str]
    output: str = ""
    errors: str = ""
    result: Any = None

    @property
    def code(self) -> int | None:
        return self.process.returncode


def start_processes(
    nodes: Sequence[Sequence[int]], target: str, arguments: Mapping[str, Any] | None = None
) -> list[Rank]:
    """Starts one process per rank, each calling `target` ("module:function") with `arguments`."""
    port, world = _free_port(), sum(map(len, nodes))
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
            "OMP_NUM_THREADS": 1,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-m", "tests.processes", target, json.dumps(arguments or {})]
        environment = {**os.environ, **{key: str(value) for key, value in own.items()}}
        pipe = subprocess.PIPE
        ranks.append(Rank(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)))
    return ranks


def collect(ranks: Sequence[Rank], *, limit_s: float = 60.0) -> list[Rank]:
    """Waits for all ranks and reads their results; whoever runs longer than `limit_s` is killed and fails the test."""
    deadline = time.monotonic() + limit_s
    late = []
    for number, rank in enumerate(ranks):
        try:
            rank.output, rank.errors = rank.process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.output, rank.errors = rank.process.communicate()
            late.append(number)
        lines = [line for line in rank.output.splitlines() if line.startswith(MARK)]
        rank.result = json.loads(lines[-1].removeprefix(MARK)) if lines else None
    assert not late, f"ranks {late} still ran after {limit_s} s: {[rank.errors[-1500:] for rank in ranks]}"
    return list(ranks)


def run_processes(
    nodes: Sequence[Sequence[int]], target: str, arguments: Mapping[str, Any] | None = None, *, limit_s: float = 60.0
) -> list[Any]:
    """Returns what `target` returned on every rank; all must succeed."""
    ranks = collect(start_processes(nodes, target, arguments), limit_s=limit_s)
    assert all(rank.code == 0 for rank in ranks), [(rank.code, rank.errors[-2000:]) for rank in ranks]
    return [rank.result for rank in ranks]


ROOT = Path(__file__).parents[1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    module, function = sys.argv[1].split(":")
    returned = getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))
    print(MARK + json.dumps(returned), flush=True)
