"""Starts the ranks of a benchmark as processes on this machine, without the lab."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import last_json


def run_ranks(script: str, *arguments: str, variables: Sequence[Mapping[str, object]], timeout_s: float) -> Any:
    """Returns the JSON object that rank 0 of a script prints last; ends the program where a rank fails.

    Args:
        script: the file to run.
        *arguments: its arguments.
        variables: environment variables of each rank, besides those with which torch finds the other ranks.
        timeout_s: how long to wait for each rank.
    """
    command = [sys.executable, str(Path(script).resolve()), *arguments]
    shared = {
        "WORLD_SIZE": len(variables),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _free_port(),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = []
    for rank, own_variables in enumerate(variables):
        added = {**shared, "RANK": rank, "LOCAL_RANK": rank, **own_variables}
        environment = {**os.environ, **{name: str(value) for name, value in added.items()}}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    exit_codes = [process.returncode for process in processes]
    if any(exit_codes):
        raise SystemExit(f"a rank failed: {exit_codes}")
    return last_json(outputs[0])


def _free_port() -> int:
    """Returns a TCP port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
