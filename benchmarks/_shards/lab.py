"""Runs `shards.py` on three ranks of an emulated node with CPU quotas, and its peer in one process."""

import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import last_json
from evenly.lab import Lab, LabCluster, LabNode

COMMAND = Path(__file__).resolve().parents[1] / "shards.py"
PEER_COMMAND = COMMAND.parent / "peer_tensor_parallel.py"
PEER_PYTHON = COMMAND.parents[1] / ".peers" / "tensor_parallel" / "bin" / "python"
NUM_RANKS = 3
POLL_S = 0.05


def run_on_lab(*arguments: str) -> Any:
    """Returns the JSON object that rank 0 of `shards.py` with these arguments prints last; CPU is not limited."""
    with Lab(LabCluster(nodes=(LabNode(name="box", ranks=NUM_RANKS),))) as lab:
        return _run(lab, arguments)


def run_with_quotas(quotas: Sequence[float], *arguments: str) -> Any:
    """Returns what `run_on_lab` does, with a folder as the last argument through which quotas begin.

    Each rank writes `ready<rank>` there; then the quotas are set and `go` is written.
    """
    cluster = LabCluster(nodes=(LabNode(name="box", ranks=NUM_RANKS),))
    with tempfile.TemporaryDirectory() as folder, Lab(cluster) as lab:

        def set_quotas() -> None:
            """Sets the quotas once all ranks are ready."""
            while not all(Path(folder, f"ready{rank}").exists() for rank in range(NUM_RANKS)):
                time.sleep(POLL_S)
            for rank, quota in enumerate(quotas):
                lab.set_cpu(rank, quota)
            Path(folder, "go").touch()

        threading.Thread(target=set_quotas, daemon=True).start()
        return _run(lab, [*arguments, folder])


def _run(lab: Lab, arguments: Sequence[str]) -> Any:
    """Returns the last JSON object of rank 0 and prints the end of what it wrote to stderr."""
    result = lab.run([sys.executable, str(COMMAND), *arguments], output="capture", timeout_s=1500)
    result.check()
    print(result.stderr[0][-4000:] if result.stderr else "", file=sys.stderr)
    return last_json(result.stdout[0])


def run_peer(name: str, batch_size: int, rounds: int, shares: Sequence[float]) -> list[float] | None:
    """Returns the seconds of each step of tensor_parallel; None where its environment is not installed."""
    if not PEER_PYTHON.exists():
        return None
    command = [str(PEER_PYTHON), str(PEER_COMMAND), name, str(batch_size), str(rounds)]
    with Lab(LabCluster(nodes=(LabNode(name="box", ranks=1, cpu=sum(shares) / 100),))) as lab:
        result = lab.run(command, output="capture", timeout_s=600)
    result.check()
    seconds: list[float] = last_json(result.stdout[0])["seconds"]
    return seconds
