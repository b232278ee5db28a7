"""Runs the methods of `exchange.py` on an emulated cluster with links of a given rate."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks._exchange.method import PERIOD
from benchmarks._exchange.methods import MethodSet
from benchmarks._exchange.networks import MAX_BATCH_SIZE
from benchmarks.common import last_json, median
from evenly.lab import Lab, LabCluster, LabNode

COMMAND = Path(__file__).resolve().parents[1] / "exchange.py"
PEERS_PYTHON = COMMAND.parents[1] / ".peers" / "exchange" / "bin" / "python"
STEP_S = 0.12  # of the busy network without exchanges: DDP comes to at most a quarter of that at 50 Mbit/s
MIN_BATCH_SIZE = 4
Figures = dict[str, Any]  # what rank 0 of `worker` prints


def run_methods(
    node_ranks: tuple[int, ...], rate_mbit: float, *, rounds: int, steps: int, method_set: MethodSet, batch_size: int
) -> Figures:
    """Returns the figures of all methods of a set, on nodes with so many ranks and links of so many Mbit/s."""
    nodes = tuple(LabNode(name=f"node{i}", ranks=ranks, rate_mbit=rate_mbit) for i, ranks in enumerate(node_ranks))
    python = PEERS_PYTHON if method_set != "short" and PEERS_PYTHON.exists() else Path(sys.executable)
    command = [str(python), str(COMMAND), "--worker", str(rounds), str(steps), method_set, str(batch_size)]
    with Lab(LabCluster(nodes=nodes)) as lab:
        result = lab.run(command, output="capture", timeout_s=1500 if method_set != "apart" else 600)
    result.check()
    print(f"{node_ranks} ranks at {rate_mbit:g} Mbit/s, {method_set}: done", file=sys.stderr, flush=True)
    figures: Figures = last_json(result.stdout[0])
    return figures


@cache
def busy_batch_size() -> int:
    """Returns the samples of a rank with which a step of the busy network takes about `STEP_S` on this machine."""
    figures = run_methods((2, 2), 200.0, rounds=2, steps=2 * PERIOD, method_set="pace", batch_size=MAX_BATCH_SIZE)
    seconds = median(figures["methods"]["no exchange"]["seconds"])
    fitting = MIN_BATCH_SIZE * round(MAX_BATCH_SIZE * STEP_S / seconds / MIN_BATCH_SIZE)
    batch_size = max(MIN_BATCH_SIZE, min(MAX_BATCH_SIZE, fitting))
    message = f"a step with {MAX_BATCH_SIZE} samples takes {1e3 * seconds:.0f} ms: batches of {batch_size}"
    print(message, file=sys.stderr, flush=True)
    return batch_size
