"""Ranks as processes that are killed, stopped and continued, and a coordinator that is killed, in random order."""

import json
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from evenly.launch.ports import free_port
from evenly.launch.settings import overlay
from tests.coordination.etcds import EtcdServer, etcd_server
from tests.coordination.member import SECRET

NODES = "abc"
SIZE = 2


class Cluster:
    """Three nodes of two ranks, each rank a process that writes what it did into a file.

    A coordinator is at an address, or two take turns with etcd.
    """

    def __init__(self, folder: Path, seed: int, etcd: EtcdServer | None = None) -> None:
        self.folder = folder
        self.rng = random.Random(seed)
        self.etcd = etcd
        self.bind = f"127.0.0.1:{0 if etcd is not None else free_port()}"
        self.num_starts = 0
        self.ranks: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.coordinators = [self.serve() for _ in range(1 if etcd is None else 2)]
        for node in NODES:
            self.start(node)

    def serve(self) -> "subprocess.Popen[bytes]":
        found = () if self.etcd is None else ("--etcd", self.etcd.url, "--job", "chaos")
        wishes = ("--bind", self.bind, "--expected-nodes", "3", "--straggler-wait", "2", *found)
        environ = overlay({"EVENLY_SECRET": SECRET.decode()})
        command = (sys.executable, "-m", "evenly", "coordinate", *wishes)
        return subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)

    def start(self, node: str) -> None:
        self.num_starts += 1
        self.ranks[node] = []
        for rank in range(SIZE):
            words = (
                self.bind if self.etcd is None else self.etcd.url,
                node,
                f"{self.num_starts}",
                str(rank),
                str(SIZE),
            )
            with (self.folder / f"{node}-{self.num_starts}-{rank}").open("wb") as output:
                command = (sys.executable, "-m", "tests.coordination.member", *words)
                self.ranks[node].append(subprocess.Popen(command, stdout=output, stderr=output))

    def fault(self) -> None:
        """Does one."""
        node = self.rng.choice(NODES)
        kind = self.rng.choice(
            ["kill node", "kill rank", "stop", "stop long", "coordinator", *([] if self.etcd is None else ["etcd"])]
        )
        if kind == "coordinator":
            killed = self.coordinators.pop(self.rng.randrange(len(self.coordinators)))
            killed.kill()
            killed.wait()
            self.coordinators.append(self.serve())
            return
        if kind == "etcd" and self.etcd is not None:
            self.etcd.kill()
            time.sleep(3 * self.rng.random())
            self.etcd.start()
            return
        if kind.startswith("stop"):
            stopped = self.ranks[node] if self.rng.random() < 0.5 else self.ranks[node][:1]
            for rank in stopped:
                rank.send_signal(signal.SIGSTOP)
            time.sleep(0.7 if kind == "stop" else 3.0)
            for rank in stopped:
                rank.send_signal(signal.SIGCONT)
            return
        for rank in self.ranks[node][: SIZE if kind == "kill node" else 1]:
            rank.kill()
        time.sleep(self.rng.random() / 2)
        for rank in self.ranks[node]:
            rank.kill()
            rank.wait()
        self.start(node)

    def lines(self) -> list[dict[str, Any]]:
        """Returns what all ranks have told, with their file; a line that was cut off by a kill is left out."""
        told = []
        for path in sorted(self.folder.iterdir()):
            for line in path.read_text().splitlines():
                with suppress(ValueError):
                    told.append({"of": path.name, **json.loads(line)})
        return told

    def num_complete(self) -> int:
        """Returns how many rounds all three nodes have applied on all ranks."""
        applied: dict[str, set[str]] = {}
        for line in self.lines():
            if len(line.get("nodes", ())) == len(NODES):
                applied.setdefault(line["round"], set()).add(line["of"])
        return sum(len(ranks) == len(NODES) * SIZE for ranks in applied.values())

    def close(self) -> None:
        for process in [*self.coordinators, *(rank for ranks in self.ranks.values() for rank in ranks)]:
            with suppress(OSError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def wait_for_rounds(cluster: Cluster, number: int, *, limit_s: float) -> None:
    before, deadline = cluster.num_complete(), time.monotonic() + limit_s
    while cluster.num_complete() < before + number:
        assert time.monotonic() < deadline, cluster.lines()[-20:]
        time.sleep(0.1)


@pytest.mark.alone
@pytest.mark.parametrize(("seed", "num_faults"), [(1, 4), pytest.param(2, 20, marks=pytest.mark.slow)])
def test_random_faults_leave_one_run(seed: int, num_faults: int, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, seed)
    do_faults(cluster, num_faults)
    assert_one_run(cluster.lines())


@pytest.mark.alone
@pytest.mark.slow
def test_random_faults_of_etcd_too_leave_one_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as etcd:
        cluster = Cluster(tmp_path_factory.mktemp("ranks"), 3, etcd)
        do_faults(cluster, 20)
        assert_one_run(cluster.lines())


def do_faults(cluster: Cluster, number: int) -> None:
    try:
        wait_for_rounds(cluster, 2, limit_s=40.0)
        for _ in range(number):
            cluster.fault()
            time.sleep(cluster.rng.random())
        wait_for_rounds(cluster, 2, limit_s=40.0)
    finally:
        cluster.close()


def assert_one_run(lines: list[dict[str, Any]]) -> None:
    commits = [line for line in lines if "round" in line]
    rounds: dict[str, set[tuple[int, str, float]]] = {}
    for line in commits:
        rounds.setdefault(line["round"], set()).add((line["number"], line["lineage"], line["value"]))
    assert all(len(results) == 1 for results in rounds.values())  # all that applied a round have the same bits
    states = [state for results in rounds.values() for state in results]
    versions = [(number, lineage) for number, lineage, _ in states]
    assert len(set(versions)) == len(versions)  # no run goes two ways
    assert len(commits) > 50


@pytest.mark.slow
def test_a_stopped_node_whose_place_was_taken_meanwhile_is_told(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, seed=0)
    try:
        wait_for_rounds(cluster, 1, limit_s=30.0)
        replaced = cluster.ranks["c"]
        for rank in replaced:
            rank.send_signal(signal.SIGSTOP)
        cluster.start("c")
        wait_for_rounds(cluster, 1, limit_s=30.0)
        for rank in replaced:
            rank.send_signal(signal.SIGCONT)
        codes = [rank.wait(timeout=20) for rank in replaced]
    finally:
        cluster.close()
        for rank in replaced:
            rank.kill()
            rank.wait()
    assert codes == [1, 1]
    assert "another start of a node of this name" in (tmp_path / "c-3-0").read_text()
