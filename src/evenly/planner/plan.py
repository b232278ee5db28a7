"""Cluster + Profile + Graph + wishes -> Plan: the least time in which all devices finish one global batch together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace

from evenly._errors import SpecError
from evenly.planner.costs import Works, exchange_seconds
from evenly.planner.layout import lay_out
from evenly.planner.lines import Kinds, Line, cut_lines, single_lines
from evenly.planner.memory import UNKNOWN, largest_layer, whole_need
from evenly.spec.cluster import Cluster
from evenly.spec.exchange import Exchange
from evenly.spec.graph import Graph
from evenly.spec.period import Adaptive, Every, EveryGradient, EverySteps, Period, period_of
from evenly.spec.plan import MOST_SAMPLES, Plan, Prediction, Replica, Role
from evenly.spec.profile import Profile

BUDGET = 0.05  # of the time may go into exchanges between nodes, if nothing else is wished


def plan(
    cluster: Cluster,
    profile: Profile,
    graph: Graph,
    *,
    batch_size: int | None = None,
    every: Every | None = None,
    cut: bool = True,
    exchange_budget: float = BUDGET,
    memory_bytes: Sequence[int] | None = None,
    exchange: Exchange | None = None,
) -> Plan:
    """Returns who does what so that a step over the global batch takes the least time, with the times it predicts.

    Every node may use some or all of its ranks, each for itself with its own number of samples, or several holding one
    network together. For a time T it is known how many samples each node can do; the least T for which they are enough
    is found by halving.

    Args:
        cluster: the nodes and ranks.
        profile: what was measured on them, or `Profile.from_speeds`.
        graph: the network, from `evenly.trace`.
        batch_size: samples of all ranks together in one step; those of the example if left out.
        every: the period K'; if left out, so many steps that exchanges take no more than `exchange_budget`.
        cut: whether several ranks may hold one network together.
        exchange_budget: the part of the time that may go into exchanges between nodes.
        memory_bytes: what each rank may use; the profile's free memory if left out.
        exchange: how exchanges are made.
    """
    profile.require_fit(cluster, graph)
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1):
        raise SpecError(f"a global batch of {batch_size!r} samples was asked for. Give a whole number, at least 1.")
    if batch_size is not None and batch_size > MOST_SAMPLES:
        raise SpecError(f"a global batch of more than {MOST_SAMPLES} samples was asked for. Give fewer.")
    task = _Task(
        cluster, profile, Works(graph), batch_size or profile.batch_size, _free(cluster, profile, memory_bytes), cut
    )
    return task.plan(every, exchange_budget, exchange or Exchange())


IDLE, HELP = 0.1, 0.03  # ranks that would wait for such a part of a step must do so much of the work, at least
EASED = 0.9  # to be so much faster while others rest is a reason to let them rest


@dataclass(frozen=True)
class _Task:
    cluster: Cluster
    profile: Profile
    works: Works
    batch: int
    free: tuple[int, ...]
    cut: bool

    def plan(self, every: Every | None, budget: float, exchange: Exchange) -> Plan:
        lines, counts, step_s, idle = self._solve()
        exchange_s = self._exchange_s(lines, counts, exchange)
        period = self._period(every, step_s, exchange_s, budget, exchange)
        if isinstance(period, EveryGradient):
            step_s += exchange_s
        roles = self._roles(lines, counts, step_s, idle)
        replicas = self._replicas(lines, counts)
        return Plan(
            roles=roles,
            period=period,
            exchange=exchange,
            replicas=replicas,
            batch_size=self.batch,
            rebalance=True,
            graph=self.works.graph.fingerprint,
            predicted=Prediction(step_s=step_s, exchange_s=exchange_s, is_measured=self.profile.is_measured),
        )

    @cached_property
    def _kinds(self) -> dict[int, tuple[object, ...]]:
        """What tells one node from another: equal ones are planned once."""
        kinds = {}
        for index, node in enumerate(self.cluster.nodes):
            devices = [self.profile.devices[rank] for rank in node.ranks]
            told = [(d.step, d.rank if d.layers else -1, self.free[d.rank]) for d in devices]
            kinds[index] = (*told, self.profile.rate(node.ranks))
        return kinds

    @cached_property
    def _groups(self) -> dict[tuple[object, ...], list[int]]:
        """Equal nodes."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for index in range(len(self.cluster.nodes)):
            groups.setdefault(self._kinds[index], []).append(index)
        return groups

    @cached_property
    def _lines(self) -> dict[int, list[Line]]:
        """The ways to use the first node of each group of equal ones."""
        firsts = [members[0] for members in self._groups.values()]
        given = (self.works, self.profile, self.free, self.batch)
        kinds: dict[int, Kinds] = {first: {} for first in firsts}
        found = {first: single_lines(self.cluster.nodes[first].ranks, *given, kinds[first]) for first in firsts}
        seconds = self._least_s(found) if self._most(found) >= self.batch else 0.0
        for first in firsts if self.cut else ():
            ranks = self.cluster.nodes[first].ranks
            samples = _best(found[first], seconds)[0] if seconds else 0
            found[first] += cut_lines(ranks, *given, kinds[first], seconds=seconds, samples=samples)
        return found

    def _most(self, lines: Mapping[int, Sequence[Line]]) -> int:
        """Returns how many samples memory allows all nodes."""
        each = {first: max((sum(line.limits) for line in own), default=0) for first, own in lines.items()}
        return sum(len(members) * each[members[0]] for members in self._groups.values())

    def _least_s(self, lines: Mapping[int, Sequence[Line]]) -> float:
        """Returns the least time in which all nodes together do the global batch."""

        def capacity(seconds: float) -> int:
            groups = self._groups.values()
            return sum(len(members) * _best(lines[members[0]], seconds)[0] for members in groups)

        low, high = 0.0, 1e-3
        while capacity(high) < self.batch:
            low, high = high, high * 2
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if capacity(middle) >= self.batch else (middle, high)
        return high

    def _solve(self) -> tuple[list[Line | None], list[list[int]], float, dict[int, str]]:
        """Returns the line and samples of each node, the time of a step, and why ranks are left out that would wait."""
        self._require_memory()
        lines, counts, step_s = self._deal(self._lines)
        idle = self._idle(lines, counts, step_s)
        ways = {first: [way for way in own if idle.keys().isdisjoint(way.ranks)] for first, own in self._lines.items()}
        fewer = self._deal(ways) if idle and self._most(ways) >= self.batch else None
        if fewer is not None and fewer[2] <= (1 + 2 * HELP) * step_s:  # twice, as samples are whole
            lines, counts, step_s = fewer
        for members in self._groups.values():
            first = self.cluster.nodes[members[0]].ranks
            for index in members:
                if (line := lines[index]) is not None:
                    lines[index] = line.on(dict(zip(first, self.cluster.nodes[index].ranks, strict=True)))
        return lines, counts, step_s, idle

    def _deal(self, ways: Mapping[int, Sequence[Line]]) -> tuple[list[Line | None], list[list[int]], float]:
        """Returns the line and samples of each node, and the least time of a step; equal nodes have the same line."""
        seconds = self._least_s(ways)
        lines: list[Line | None] = [None] * len(self.cluster.nodes)
        counts: list[list[int]] = [[]] * len(self.cluster.nodes)
        for members in self._groups.values():
            total, line, samples = _best(ways[members[0]], seconds)
            for index in members if total else ():
                lines[index], counts[index] = line, list(samples)
        _trim(lines, counts, self.batch)
        return lines, counts, max(_ends(lines, counts))

    def _idle(self, lines: Sequence[Line | None], counts: Sequence[list[int]], step_s: float) -> dict[int, str]:
        """Returns ranks that would wait for much of every step and together do next to nothing of the work, and why.

        Samples are whole, so there may be no number of them that fills the time of a slow rank.
        """
        waiting = []
        for members in self._groups.values():
            line, first = lines[members[0]], self.cluster.nodes[members[0]].ranks
            for place, crew in enumerate(line.crews if line is not None else ()):
                samples = [counts[index][place] for index in members]
                part = line.end_s(place, max(samples)) / step_s if line is not None and any(samples) else 1.0
                if part < 1 - IDLE:
                    seats = [first.index(rank) for rank in crew.ranks]
                    ranks = [self.cluster.nodes[index].ranks[seat] for index in members for seat in seats]
                    told = f"it would be busy for {part:.0%} of a step only, and steps are hardly shorter with it"
                    waiting.append((sum(samples), ranks, told))
        idle: dict[int, str] = {}
        done = 0
        for work, ranks, told in sorted(waiting):
            done += work
            idle |= dict.fromkeys(ranks if done <= HELP * self.batch else (), told)
        return idle

    def _require_memory(self) -> None:
        most = self._most(self._lines)
        if most >= self.batch:
            return
        need = whole_need(self.works, self.profile.sample_bytes)
        missing = need.fixed_bytes + need.sample_bytes * self.batch - sum(self.free)
        case = (
            f"together {missing / 1e9:.3g} GB too little" if missing > 0 else "no way to cut it fits into all of them"
        )
        raise SpecError(
            f"a global batch of {self.batch} samples was asked for, but the devices hold {most}: one device needs "
            f"{need.fixed_bytes / 1e9:.3g} GB for the network, whose largest layer is "
            f"{largest_layer(self.works.graph)!r}, and {need.sample_bytes / 1e6:.3g} MB a sample, and the devices have "
            f"{', '.join(f'{size / 1e9:.3g}' for size in sorted(set(self.free)))} GB, {case}. Use a smaller batch, or "
            "more memory."
        )

    def _exchange_s(self, lines: Sequence[Line | None], counts: Sequence[list[int]], exchange: Exchange) -> float:
        each = zip(self.cluster.nodes, lines, counts, strict=True)
        used = [node.ranks for node, line, samples in each if line is not None and any(samples)]
        return exchange_seconds(self.works.exchanged_bytes(exchange), used, self.profile)

    def _period(
        self, every: Every | None, step_s: float, exchange_s: float, budget: float, exchange: Exchange
    ) -> Period:
        if not 0 < budget < 1:
            raise SpecError(f"exchange_budget={budget} was asked for; it is a part of the time, between 0 and 1.")
        period = period_of("epoch" if every is None else every)
        if isinstance(period, Adaptive):
            return exchange.begun(period, step_s=step_s, exchange_s=exchange_s)
        if every is not None:
            return period
        transfer_s = exchange_s / exchange.fragments
        steps = exchange.affordable_steps(step_s=step_s, transfer_s=transfer_s, budget=budget)
        return EverySteps(steps) if exchange_s or exchange.fragments > 1 else period

    def _roles(
        self, lines: Sequence[Line | None], counts: Sequence[list[int]], step_s: float, idle: Mapping[int, str]
    ) -> tuple[Role, ...]:
        roles: dict[int, Role] = {}
        for index, node in enumerate(self.cluster.nodes):
            line = lines[index]
            for crew, samples in zip(line.crews if line else (), counts[index], strict=True):
                computing = crew.compute_s(samples)
                most = crew.most_samples(self.free)
                for rank, seconds, need in zip(crew.ranks, computing, crew.needs, strict=True):
                    roles[rank] = self._role(
                        rank, index, samples=samples, compute_s=seconds,
                        memory_bytes=need.fixed_bytes + need.sample_bytes * samples,
                        most_samples=most if most < UNKNOWN else 0, free_bytes=self.free[rank],
                    )  # fmt: skip
            for rank in node.ranks:
                if rank not in roles or not roles[rank].samples:
                    roles[rank] = self._role(rank, index, left_out=idle.get(rank) or self._why_left_out(rank, step_s))
        return tuple(roles[rank] for rank in range(self.cluster.world_size))

    def _role(self, rank: int, node: int, **fields: object) -> Role:
        return Role(rank=rank, node=node, device=self.cluster.device_of(rank).kind, **fields)

    def _why_left_out(self, rank: int, step_s: float) -> str:
        """Returns what keeps a rank from taking part."""
        device, need = self.profile.devices[rank], whole_need(self.works, self.profile.sample_bytes)
        if need.samples_in(self.free[rank]) < 1:
            return f"its {self.free[rank] / 1e9:.3g} GB do not hold the network and a sample"
        own_s, averaging_s = device.step.at(1), device.averaging_s or 0.0
        if own_s > step_s:
            return f"one sample would take it {1e3 * own_s:.3g} ms, longer than the step"
        node = self.cluster.nodes[self.cluster.node_of(rank)].ranks
        others = [other for other in node if other != rank]
        helped = min(others, key=lambda other: self.profile.devices[other].alone, default=rank)
        if others and (eased := self.profile.devices[helped].alone) < EASED:
            return f"rank {helped}, of its node, needs only {eased:.0%} of its time while this one rests"
        if own_s + averaging_s > step_s:
            return (
                f"a sample takes it {1e3 * own_s:.3g} ms and averaging {1e3 * averaging_s:.3g} ms, longer than the step"
            )
        return "averaging with it takes longer than it can help"

    def _replicas(self, lines: Sequence[Line | None], counts: Sequence[list[int]]) -> tuple[Replica, ...]:
        crews = [
            (crew, samples)
            for line, own in zip(lines, counts, strict=True)
            for crew, samples in zip(line.crews if line else (), own, strict=True)
            if samples
        ]
        if all(crew.layout is None for crew, _ in crews):
            return ()
        whole = lay_out(self.works.graph, [1.0])
        return tuple(Replica(ranks=crew.ranks, layout=crew.layout or whole) for crew, _ in crews)


def _best(lines: Sequence[Line], seconds: float) -> tuple[int, Line | None, list[int]]:
    """Returns the line that does the most samples in this time, with how many each crew does; the first of equals."""
    known: dict[int, int] = {}
    ways = [(line, line.samples(seconds, known)) for line in lines]
    line, samples = max(ways, key=lambda way: sum(way[1]), default=(None, []))
    return sum(samples), line, samples


def _ends(lines: Sequence[Line | None], counts: Sequence[list[int]]) -> list[float]:
    """Returns when each node has finished its samples."""
    return [
        max(line.end_s(place, samples) for place, samples in enumerate(own) if samples)
        for line, own in zip(lines, counts, strict=True)
        if line is not None and any(own)
    ]


def _trim(lines: Sequence[Line | None], counts: list[list[int]], batch: int) -> None:
    """Takes away the samples that are too many, each from whoever finishes last."""
    ends = [
        (-line.end_s(place, samples), index, place)
        for index, line in enumerate(lines)
        if line is not None
        for place, samples in enumerate(counts[index])
        if samples
    ]
    heapify(ends)
    for _ in range(sum(map(sum, counts)) - batch):
        _, index, place = ends[0]
        line, counts[index][place] = lines[index], counts[index][place] - 1
        left = counts[index][place]
        ended = -line.end_s(place, left) if line is not None and left else 1.0
        heapreplace(ends, (ended, index, place))


def _free(cluster: Cluster, profile: Profile, given: Sequence[int] | None) -> tuple[int, ...]:
    if given is None:
        return tuple(device.free_bytes for device in profile.devices)
    if len(given) != cluster.world_size or any(size <= 0 for size in given):
        raise SpecError(
            f"memory_bytes={list(given)} was given for {cluster.world_size} ranks. Give one number above 0 for each."
        )
    return tuple(given)
