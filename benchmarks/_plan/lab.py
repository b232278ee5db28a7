"""Runs `plan.py` on every rank of an emulated cluster, with CPU quotas that change during the run."""

import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import last_json
from evenly.lab import Lab, LabCluster, LabNode

COMMAND = Path(__file__).resolve().parents[1] / "plan.py"
POLL_S = 0.02
Quotas = Sequence[float | None]  # of a core, one for each rank; None: no limit


class QuotaRequests:
    """Ranks ask for the next CPU quotas and wait until they hold. Requests and answers are files in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._num_requests = 0

    def request(self, rank: int) -> None:
        """Waits until all ranks have called this and the next quotas hold."""
        self._num_requests += 1
        (self._folder / f"{self._num_requests}.{rank}").touch()
        _wait_for(self._folder / f"{self._num_requests}.done")

    def serve(self, lab: Lab, answers: Sequence[Quotas]) -> None:
        """Sets the quotas of `answers`, one after another, each when all ranks have requested it."""
        for number, quotas in enumerate(answers, start=1):
            for rank in range(len(quotas)):
                _wait_for(self._folder / f"{number}.{rank}")
            for rank, quota in enumerate(quotas):
                lab.set_cpu(rank, quota)
            (self._folder / f"{number}.done").touch()


def _wait_for(path: Path) -> None:
    """Returns once the file exists."""
    while not path.exists():
        time.sleep(POLL_S)


def run_command(lab: Lab, *arguments: str, timeout_s: float) -> Any:
    """Returns the JSON object that rank 0 of `plan.py` with these arguments prints last."""
    result = lab.run([sys.executable, str(COMMAND), *arguments], output="capture", timeout_s=timeout_s)
    result.check()
    return last_json(result.stdout[0])


def run_with_quotas(nodes: Sequence[LabNode], *arguments: str, answers: Sequence[Quotas], timeout_s: float) -> Any:
    """Returns what `run_command` does on a new cluster, with the folder of `QuotaRequests` as the last argument.

    `answers` are the quotas that the ranks get when they request them, one after another.
    """
    with tempfile.TemporaryDirectory() as folder, Lab(LabCluster(nodes=tuple(nodes))) as lab:
        threading.Thread(target=QuotaRequests(folder).serve, args=(lab, answers), daemon=True).start()
        return run_command(lab, *arguments, folder, timeout_s=timeout_s)
