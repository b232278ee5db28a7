"""Runs the programs of a tool once for all of its tests, also where several processes of pytest share these."""

import fcntl
import json
import os
from collections.abc import Sequence
from typing import Any

import pytest

from tests.integrations.batches import NODES
from tests.processes import run_processes
from tests.scripts import run_script


def ranks_of(tool: str, folders: pytest.TempPathFactory) -> list[Any]:
    """Returns what `run_all` of the programs of `tool` returned on each of three ranks: to start them takes longest."""
    shared = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each process of pytest has a folder of its own in the one of the run
        shared = shared.parent
    results = shared / f"{tool}.json"
    with (shared / f"{tool}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            arguments = {"folder": str(folders.mktemp(tool))}
            found = run_processes(NODES, f"tests.integrations.{tool}_programs:run_all", arguments, limit_s=300.0)
            results.write_text(json.dumps(found))
    ranks: list[Any] = json.loads(results.read_text())
    return ranks


def run_scripts(scripts: Sequence[str], folder: str) -> list[str]:
    """Returns what each of the scripts prints in this folder, one after another."""
    return [run_script(script, [[]], folder) for script in scripts]
