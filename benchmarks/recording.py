"""What it costs a step that its run is recorded.

Two processes, each a node of its own, exchange every 10 steps. They train in turns, in sessions with a folder and
without one. A session with a folder keeps a record: `run.jsonl`, and what each rank did in every step in `ranks/`. The
network is small: steps of a few milliseconds are the worst case, since a record costs the same in a long step.

The claim is the time inside of the functions that record, on rank 0, which writes both, over that of the whole step:
both by the same clock, which costs little to read. Beside it are its two parts, and the median of the times of both
sessions with a record over those without, less one, with its standard error: it includes everything, but on a busy
machine it is too coarse for parts of a per cent.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Claim, Row, median, write_result
from benchmarks.local_ranks import run_ranks

STEPS = 40  # of a turn
METHODS = ("recorded", "not recorded", "not recorded again", "recorded again")


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_recording_rank(arguments.worker, Path(arguments.folder))
        return
    rounds = 30 if arguments.quick else 400
    variables = [{"LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0, "OMP_NUM_THREADS": 1}] * 2
    with tempfile.TemporaryDirectory() as folder:
        options = ["--worker", str(rounds), "--folder", folder]
        measured = run_ranks(__file__, *options, variables=variables, timeout_s=580)
        sizes = [file.stat().st_size for file in Path(folder).rglob("*.jsonl")]
    report(measured["turns"], measured["inside_s"], written_bytes=sum(sizes), save=arguments.save)


def run_recording_rank(rounds: int, folder: Path) -> None:
    """Trains in turns; rank 0 prints the seconds of a step in each turn. Ends the process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    turns = [
        make_turn(folder / str(number) if method.startswith("recorded") else None)
        for number, method in enumerate(METHODS)
    ]
    inside = InsideRecording()
    seconds: list[list[float]] = [[] for _ in METHODS]
    for number in range(rounds + 1):
        for place in range(len(METHODS)):
            index = (place + number) % len(METHODS)
            if number == 1 and place == 0:
                inside.seconds = dict.fromkeys(inside.seconds, 0.0)  # the first round warms up
            inside.is_counted = METHODS[index].startswith("recorded")
            seconds[index].append(turns[index]())
    if int(os.environ["RANK"]) == 0:
        print(json.dumps({"turns": [values[1:] for values in seconds], "inside_s": inside.seconds}), flush=True)
    dist.barrier() if dist.is_initialized() else time.sleep(1)
    os._exit(0)


class InsideRecording:
    """Adds the time inside of what records steps, exchanges and events."""

    def __init__(self) -> None:
        from evenly.session.rank_recorder import RankRecorder
        from evenly.session.recorder import Recorder

        self.seconds = {"ranks/": 0.0, "run.jsonl": 0.0}
        self.is_counted = False
        self._wrap(RankRecorder, "step_done", "ranks/")
        self._wrap(RankRecorder, "exchange_done", "ranks/")
        self._wrap(Recorder, "record", "run.jsonl")

    def _wrap(self, owner: type, name: str, file: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                if self.is_counted:
                    self.seconds[file] += time.perf_counter() - began

        setattr(owner, name, timed)


def make_turn(folder: Path | None) -> Callable[[], float]:
    """Returns a function that makes some steps in a session and returns the seconds of one."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import evenly

    session = evenly.Session(folder, nodes=[[0], [1]], progress=False, checkpoint_every=None).__enter__()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = session.plan(batch_size=32, every=10)
    data = TensorDataset(torch.randn(6400, 64))
    synchronized, optimizer, loader = session.prepare(model, optimizer, data, plan=plan)

    def train() -> Iterator[None]:
        for _ in session.epochs(10**6):
            for (x,) in loader:
                synchronized(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                yield

    steps = train()
    session.run_clock.pause()

    def turn() -> float:
        session.run_clock.resume()
        began = time.perf_counter()
        for _ in range(STEPS):
            next(steps)
        taken_s = time.perf_counter() - began
        session.run_clock.pause()
        return taken_s / STEPS

    return turn


def report(turns: list[list[float]], inside_s: dict[str, float], *, written_bytes: int, save: bool) -> None:
    """Prints rows and the claim as a table and as JSON; with `save` writes them to `results/recording.json`."""
    recorded, plain, plain_again, recorded_again = turns
    costs = [(a + d) / (b + c) - 1 for a, b, c, d in zip(recorded, plain, plain_again, recorded_again, strict=True)]
    steps_s = STEPS * (sum(recorded) + sum(recorded_again))
    rows: list[Row] = [
        {"method": name, "ms_per_step": 1e3 * median(values)} for name, values in zip(METHODS, turns, strict=True)
    ]
    rows += [
        {"method": f"writing {file}, part of a step", "median": value / steps_s} for file, value in inside_s.items()
    ]
    rows += [_row(costs)]
    note = (
        f"Ten layers of 64 x 64, batch 32, {STEPS} steps a turn, {len(costs)} rounds, two nodes of one rank, exchanges "
        f"every 10 steps. {written_bytes} bytes were written."
    )
    claims = [Claim("recording_cost_of_step", sum(inside_s.values()) / steps_s, 0.005, "lower")]
    write_result("recording", rows, claims, note=note, save=save)


def _row(costs: list[float]) -> Row:
    """Returns the median of what turns with a record took more, and its standard error."""
    middle = median(costs)
    deviation = 1.48 * median([abs(cost - middle) for cost in costs])
    return {
        "method": "turns with a record over turns without, less one",
        "median": middle,
        "standard_error": 1.25 * deviation / len(costs) ** 0.5,
    }


if __name__ == "__main__":
    main()
