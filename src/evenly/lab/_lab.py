"""The emulated cluster: built, used and removed."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from evenly.errors import LabError
from evenly.lab import _cgroups, _network
from evenly.lab._cgroups import Hierarchy
from evenly.lab._fit import check_fit, online_cores
from evenly.lab._machine import hierarchy
from evenly.lab._names import new_name, parse_name
from evenly.lab._output import Output, open_outlet
from evenly.lab._ranks import RankSlot, command_line, environment, hosts_file, slots
from evenly.lab._running import Running
from evenly.lab._signals import orderly_end, uninterrupted
from evenly.lab.cluster import LabCluster, LabNode
from evenly.lab.result import LabResult


class Lab:
    """An emulated cluster that exists inside a `with` block and is removed at its end, also after an error.

        with Lab(load_cluster("demo")) as lab:
            result = lab.run(["python", "train.py"]).check()

    The nodes cannot reach the host's network. If the owner is killed, the ranks end with it, and the next lab, or
    `clean`, removes the rest.
    """

    def __init__(self, cluster: LabCluster) -> None:
        self.cluster = cluster
        self._slots = slots(cluster)
        self._name = str(new_name())
        self._hierarchy: Hierarchy | None = None
        self._groups: dict[RankSlot, tuple[Path, ...]] = {}
        self._running = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(orderly_end())
        try:
            with uninterrupted():
                self._build()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_down()

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: Output = "prefix",
        timeout_s: float | None = None,
        grace_s: float = 10.0,
    ) -> LabResult:
        """Runs `command` once per rank and returns exit codes, seconds and bytes.

        Args:
            command: the program and its arguments, the same for every rank.
            env: variables for every rank, over those of the lab, over those of this process.
            output: `prefix` writes each line after its rank's name, `rank0` shows rank 0 as it is, `capture` keeps all.
            timeout_s: after this time every rank is ended.
            grace_s: how long the others may run after a rank has failed; `math.inf` lets them finish.
        """
        if self._running or not command:
            state = "one is still running" if self._running else "it is empty"
            raise LabError(f"a command was to run in the lab, but {state}. Give one command at a time.")
        outlet = open_outlet(output, slots=self._slots)
        running, before, begun = Running(outlet), self.counters(), time.monotonic()
        until = math.inf if timeout_s is None else begun + timeout_s
        self._running, completed = True, False
        try:
            for slot in self._slots:
                running.start(self._rank_command(command, slot=slot, env=env or {}), slot=slot)
            completed = running.follow(until=until, grace_s=grace_s)
        finally:
            self._running = False
            running.stop(self._kill_ranks)
        after = self.counters()
        return LabResult(
            exit_codes=running.exit_codes(),
            first_failed=next((slot.rank for slot in running.failed), None),
            timed_out=not completed and not running.failed,
            wall_s=running.ended_at - begun,
            sent_bytes=tuple(end[0] - start[0] for end, start in zip(after, before, strict=True)),
            received_bytes=tuple(end[1] - start[1] for end, start in zip(after, before, strict=True)),
            stdout=outlet.texts("stdout"),
            stderr=outlet.texts("stderr"),
        )

    def counters(self) -> tuple[tuple[int, int], ...]:
        """Returns for each node the bytes (sent, received) over its link since the lab was built."""
        self._require_built()
        return _network.counters(self._name, num_nodes=len(self.cluster.nodes))

    def set_cpu(self, rank: int, cores_worth: float | None) -> None:
        """Sets the CPU quota of a rank from now on, in cores, None for no limit; from any thread, also mid-run."""
        cpu = LabNode(cpu=cores_worth).cpu_of(0)
        _in_range(rank, count=len(self._slots), kind="rank")
        _cgroups.set_quota(self._require_built(), lab=self._name, rank=rank, cores_worth=cpu)

    def set_rate(self, node: int, mbit: float | None) -> None:
        """Sets the rate of a node's link from now on, None for no limit; from any thread, also mid-run."""
        rate = LabNode(rate_mbit=mbit).rate_mbit
        _in_range(node, count=len(self.cluster.nodes), kind="node")
        self._require_built()
        _network.shape(self._name, index=node, rate_mbit=rate)

    def set_connected(self, node: int, *, is_connected: bool) -> None:
        """Cuts the cable of a node, or mends it; from any thread, also mid-run."""
        _in_range(node, count=len(self.cluster.nodes), kind="node")
        self._require_built()
        _network.connect(self._name, index=node, is_connected=is_connected)

    def _build(self) -> None:
        self._hierarchy = cgroups = hierarchy()
        check_fit(self.cluster, online=online_cores())
        _remove_abandoned(cgroups)
        _cgroups.open_lab(cgroups, lab=self._name, num_ranks=len(self._slots))
        for slot in self._slots:
            node = self.cluster.nodes[slot.node]
            self._groups[slot] = _cgroups.open_rank(cgroups, lab=self._name, rank=slot.rank, cores=node.cores)
            self.set_cpu(slot.rank, node.cpu_of(slot.local_rank))
        _network.build(self._name, nodes=self.cluster.nodes)

    def _take_down(self) -> None:
        try:
            with uninterrupted():
                if self._hierarchy is not None:
                    _remove(self._name, cgroups=self._hierarchy)
                self._hierarchy = None
        finally:
            self._stack.close()

    def _require_built(self) -> Hierarchy:
        if self._hierarchy is None:
            raise LabError("the lab was used, but it is not built. Use it inside `with Lab(cluster) as lab:`.")
        return self._hierarchy

    def _rank_command(self, command: Sequence[str], *, slot: RankSlot, env: Mapping[str, str]) -> list[str]:
        return command_line(
            command,
            variables={**environment(self.cluster, slot=slot), **env},
            owner=os.getpid(),
            namespace=_network.namespace_path(self._name, index=slot.node),
            hostname=self.cluster.nodes[slot.node].name,
            hosts=hosts_file(self.cluster),
            groups=self._groups[slot],
        )

    def _kill_ranks(self) -> None:
        for slot in self._slots:
            _cgroups.kill_rank(self._require_built(), lab=self._name, rank=slot.rank)


def clean() -> tuple[str, ...]:
    """Removes labs whose owner is gone, and returns their names."""
    return _remove_abandoned(hierarchy())


def _remove_abandoned(cgroups: Hierarchy) -> tuple[str, ...]:
    labs = {parse_name(name) for name in _network.namespaces() | _cgroups.labs(cgroups)}
    abandoned = sorted(str(lab) for lab in labs if lab is not None and lab.abandoned)
    for lab in abandoned:
        _remove(lab, cgroups=cgroups)
    return tuple(abandoned)


def _remove(lab: str, *, cgroups: Hierarchy) -> None:
    try:
        _cgroups.remove_lab(cgroups, lab=lab)
    finally:
        _network.remove(sorted(name for name in _network.namespaces() if name.startswith(f"{lab}-")))


def _in_range(index: int, *, count: int, kind: str) -> None:
    if index not in range(count):
        raise LabError(f"{kind} {index} was named, but the lab has {kind}s 0 to {count - 1}. Name one of them.")
