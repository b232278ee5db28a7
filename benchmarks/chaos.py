"""Random faults while three nodes of two ranks train: what a lost node, rank, cable or coordinator costs the others.

The nodes are emulated by network namespaces of this machine; ranks are real processes, faults are real signals, cut
cables and starved processors. The schedule of the faults follows from the seed. Before it, the same training runs
without faults, whose loss is compared epoch by epoch.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._chaos.agent import NODES, RANKS
from benchmarks.common import Claim, Row, median, write_result
from evenly.lab import Lab, LabCluster, LabNode

KINDS = ("kill node", "kill rank", "stop", "cut", "kill coordinator", "nan", "slow")
HELD_S = {"stop": 3.5, "cut": 3.5, "slow": 3.0}  # how long such a fault lasts
DETECTION_S = 2.0  # a rank that is not heard for so long is lost
SAMPLES = 6000
REJOIN_S = 30.0
Event = dict[str, Any]


def main() -> None:
    """Runs the training without and with faults, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a dozen faults")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=360.0, help="of the run with faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--keep", type=Path, help="folder for the events of all nodes")
    arguments = parser.parse_args()
    faults, seconds = (12, 45.0) if arguments.quick else (arguments.faults, arguments.seconds)
    calm = run(None, seconds=15.0 if arguments.quick else 60.0, faults=0, folder=arguments.keep)
    wild = run(random.Random(arguments.seed), seconds=seconds, faults=faults, folder=arguments.keep)
    report(calm, wild, seed=arguments.seed, save=arguments.save)


def run(dice: random.Random | None, *, seconds: float, faults: int, folder: Path | None) -> "Record":
    """Returns what happened in a training of so many seconds, with so many faults."""
    work = Path(tempfile.mkdtemp(prefix="evenly-chaos-"))
    cluster = LabCluster(nodes=(*(LabNode(name=f"node{i}") for i in range(NODES)), LabNode(name="coordinator")))
    try:
        with Lab(cluster) as lab:
            master = Master(lab, work, dice, seconds=seconds, faults=faults)
            thread = threading.Thread(target=master.run, daemon=True)
            thread.start()
            root = Path(__file__).resolve().parents[1]
            env = {
                "CHAOS_COORDINATOR": f"10.77.0.{NODES + 1}",
                "PYTHONPATH": f"{root}:{root / 'src'}",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-m", "benchmarks._chaos.agent", str(work)]
            lab.run(command, env=env, output="capture", timeout_s=seconds + 90, grace_s=30)
            thread.join()
        return Record(work, master.made)
    finally:
        if folder is not None:
            shutil.copytree(work, folder / ("faults" if dice else "calm"), dirs_exist_ok=True)
        shutil.rmtree(work, ignore_errors=True)


class Master:
    """Makes the faults, from a thread beside the lab."""

    def __init__(self, lab: Lab, work: Path, dice: random.Random | None, *, seconds: float, faults: int) -> None:
        self.lab, self.work, self.dice = lab, work, dice
        self.seconds, self.faults = seconds, faults
        self.made: list[Event] = []

    def run(self) -> None:
        """Waits for the first exchange of all nodes, makes the faults, and ends the training."""
        try:
            wait_until(lambda: any(e["kind"] == "commit" and e["nodes"] == NODES for e in read(self.work)), 60)
            began = time.time()
            for number in range(self.faults):
                due = began + self.seconds * number / self.faults
                time.sleep(max(0.0, due - time.time()))
                if time.time() > began + self.seconds:
                    break
                self.make_fault()
            time.sleep(max(0.0, began + self.seconds - time.time()))
        finally:
            self.end()

    def make_fault(self) -> None:
        """Makes one fault at a node that trains, if another one does, too."""
        if self.dice is None:
            return
        kind = self.dice.choice(KINDS)
        node = self.dice.randrange(NODES)
        if not wait_until(lambda: all(map(self.trains, range(NODES))), REJOIN_S):
            self.made.append({"t": time.time(), "kind": "nobody came back", "node": f"node{node}"})
            return
        if kind == "kill coordinator":
            self.note(kind, "coordinator")
            self.kill(self.pids("coordinator"))
            return
        self.note(kind, f"node{node}")
        pids = self.pids(f"node{node}")
        if kind == "kill node":
            self.kill(pids)
        elif kind == "kill rank":
            self.kill([self.dice.choice(pids)])
        elif kind == "nan":
            (self.work / f"nan-node{node}").touch()
        else:
            threading.Thread(target=self.hold, args=(kind, node, pids), daemon=True).start()

    def hold(self, kind: str, node: int, pids: list[int]) -> None:
        """Keeps a fault up for its time."""
        if kind == "stop":
            self.send(pids, signal.SIGSTOP)
        elif kind == "cut":
            self.lab.set_connected(node, is_connected=False)
        else:
            self.lab.set_cpu(node, 0.1)
        time.sleep(HELD_S[kind])
        if kind == "stop":
            self.send(pids, signal.SIGCONT)
        elif kind == "cut":
            self.lab.set_connected(node, is_connected=True)
        else:
            self.lab.set_cpu(node, None)

    def trains(self, node: int) -> bool:
        """Whether a node has exchanged after its last start and after the last fault that it had."""
        events = read(self.work, f"node{node}")
        own = [f for f in self.made if f["node"] in (f"node{node}", "coordinator")]
        last = max((f["t"] + HELD_S.get(f["kind"], 0.0) for f in own), default=0.0)
        starts = max((e["t"] for e in events if e["kind"] == "start"), default=0.0)
        return any(e["kind"] == "commit" and e["t"] > max(last, starts) for e in events[-30:])

    def note(self, kind: str, node: str) -> None:
        """Records a fault."""
        self.made.append({"t": time.time(), "kind": kind, "node": node})

    def pids(self, name: str) -> list[int]:
        """Returns the processes that a machine runs now."""
        with suppress(OSError, ValueError):
            return list(json.loads((self.work / f"pids-{name}.json").read_text())["pids"])
        return []

    def kill(self, pids: list[int]) -> None:
        """Kills processes."""
        self.send(pids, signal.SIGKILL)

    def send(self, pids: list[int], number: int) -> None:
        """Sends a signal to processes, those that are gone left out."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Ends the training."""
        (self.work / "stop").touch()
        time.sleep(1.0)
        for node in range(NODES):
            self.kill(self.pids(f"node{node}"))


class Record:
    """What the nodes of one run wrote."""

    def __init__(self, work: Path, faults: list[Event]) -> None:
        self.faults, self.events = faults, read(work)
        self.losses = {e["epoch"]: e["loss"] for e in self.events if e["kind"] == "epoch"}
        self.trained: dict[int, set[int]] = {}
        for file in work.glob("trained-*.txt"):
            for line in file.read_text().splitlines():
                epoch, *numbers = line.split()
                self.trained.setdefault(int(epoch), set()).update(map(int, numbers))
        self.commits = [e for e in self.events if e["kind"] == "commit"]
        self.untrained = sum(SAMPLES - len(self.trained.get(epoch, ())) for epoch in self.losses)

    def after(self, fault: Event) -> float:
        """Returns the seconds from a fault to the next exchange that another node was in."""
        times = [e["t"] - fault["t"] for e in self.commits if e["node"] != fault["node"] and e["t"] > fault["t"]]
        return min(times, default=float("inf"))

    def of_kind(self, *kinds: str) -> list[Event]:
        """Returns the faults of these kinds that training went on after."""
        end = max((e["t"] for e in self.commits), default=0.0)
        return [fault for fault in self.faults if fault["kind"] in kinds and fault["t"] < end - 5]

    def pause(self, fault: Event) -> float:
        """Returns the longest time without a step on a node in the seconds after a fault."""
        gaps = [e for e in self.events if e["kind"] == "gap" and e["node"] != fault["node"]]
        return max((e["seconds"] for e in gaps if fault["t"] < e["t"] < fault["t"] + 3), default=0.0)

    def restarts_without_fault(self) -> int:
        """Returns how often a node was started again though neither it nor one of its ranks was killed."""
        count = 0
        for event in (
            e for e in self.events if e["kind"] == "start" and e["node"] != "coordinator" and e["number"] > 0
        ):
            killed = [f for f in self.faults if f["node"] == event["node"] and f["kind"].startswith("kill")]
            count += not any(event["t"] - 8 < f["t"] < event["t"] for f in killed)
        return count


def report(calm: Record, wild: Record, *, seed: int, save: bool) -> None:
    """Prints a line for each kind of fault, and the claims."""
    rows: list[Row] = []
    for kind in KINDS:
        faults = wild.of_kind(kind)
        seconds = [wild.after(fault) for fault in faults]
        if faults:
            rows.append(
                {"fault": kind, "number": len(faults), "next_exchange_s": median(seconds), "longest_s": max(seconds)}
            )
    kills = [wild.after(fault) for fault in wild.of_kind("kill node", "kill rank")] or [float("inf")]
    hangs = [wild.after(fault) for fault in wild.of_kind("stop", "cut")] or [0.0]
    pauses = [wild.pause(fault) for fault in wild.of_kind("kill coordinator")] or [0.0]
    again = [e for e in wild.events if e["kind"] == "log" and "different values" in e["text"]]
    last = min(max(calm.losses, default=0), max(wild.losses, default=0))
    calm_loss, wild_loss = (best_losses(record, last) for record in (calm, wild))
    faults = len([fault for fault in wild.faults if fault["kind"] in KINDS])
    claims = [
        Claim("faults", faults, 100, "higher"),
        Claim("commit_after_kill_p50_s", round(median(kills), 3), 0.2, "lower"),
        Claim("commit_after_kill_max_s", round(max(kills), 3), 1.0, "lower"),
        Claim("commit_after_hang_or_cut_max_s", round(max(hangs), 3), DETECTION_S + 1.0, "lower"),
        Claim("coordinator_kill_pause_s", round(max(pauses), 3), 1.0, "lower"),
        Claim("samples_unaccounted", wild.untrained, 0, "lower"),
        Claim("checksum_mismatches", len(again), 0, "lower"),
        Claim("restarts_of_nodes_without_a_fault", wild.restarts_without_fault(), 0, "lower"),
        Claim("loss_over_faultless", round(wild_loss / calm_loss, 4), 1.02, "lower"),
    ]
    note = (
        f"Seed {seed}; {NODES} nodes of {RANKS} ranks, {len(wild.losses)} epochs of {SAMPLES} samples with faults and "
        f"{len(calm.losses)} without, {len(wild.commits)} exchanges seen by nodes. Loss: the mean of the five "
        f"smallest up to epoch {last}, which both have made. Faults that last do so for 3 to 3.5 s. Next exchange: "
        "from the fault to the next exchange in which another node took part."
    )
    write_result("chaos", rows, claims, note=note, save=save)


def best_losses(record: Record, last: int) -> float:
    """Returns the mean of the five smallest losses of the epochs up to `last`: later the network learns by heart."""
    losses = sorted(loss for epoch, loss in record.losses.items() if epoch <= last)[:5]
    return sum(losses) / len(losses) if losses else math.inf


def read(work: Path, name: str = "*") -> list[Event]:
    """Returns the events of nodes in the order of their times."""
    events: list[Event] = []
    for file in work.glob(f"events-{name}.jsonl"):
        for line in file.read_text().splitlines():
            with suppress(ValueError):
                events.append(json.loads(line))
    return sorted(events, key=lambda event: event["t"])


def wait_until(is_there: Any, limit_s: float) -> bool:
    """Returns whether something has happened within the limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if is_there():
            return True
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    main()
