"""Cluster + Profile + Graph + wishes -> Plan: the least time in which all devices finish one global batch together."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from evenly.errors import SpecError
from evenly.layouts.layout import lay_out
from evenly.planner.batch_shares import Groups, best, capacity, ends, trim
from evenly.planner.costs import GraphCosts, exchange_seconds
from evenly.planner.fewer_nodes import distances, mean_step_s, try_sets
from evenly.planner.memory import UNKNOWN, largest_layer, whole_need
from evenly.planner.node_options import Kinds, NodeOption, cut_options, single_options
from evenly.planner.reasons import costs_more, why_cut, why_left_out
from evenly.planner.replica_options import ReplicaOption
from evenly.spec.cluster import Cluster
from evenly.spec.exchange import Exchange
from evenly.spec.graph import Graph
from evenly.spec.period import Adaptive, Every, EveryGradient, EverySteps, Period, period_of
from evenly.spec.plan import MOST_SAMPLES, Plan, Prediction, Replica, Role
from evenly.spec.profile import Profile

BUDGET = 0.05  # of the time may go into exchanges between nodes, if nothing else is wished
LEAST_BUDGET = 1e-6


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
    """Returns who does what so that a step over the global batch takes the least time, exchanges included.

    Every node may use some or all of its ranks, each for itself with its own number of samples, or several holding one
    network together. For a time T it is known how many samples each node can do; the least T for which they are enough
    is found by halving; where exchanges cost time, also for fewer nodes.

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
    if not isinstance(exchange_budget, int | float) or not LEAST_BUDGET <= exchange_budget < 1:
        raise SpecError(
            f"exchange_budget={exchange_budget!r} was asked for; it is a part of the time, from {LEAST_BUDGET:g} to 1."
        )
    free = _free(cluster, profile, memory_bytes)
    wishes = _Wishes(batch_size or profile.batch_size, cut, every, exchange_budget, exchange or Exchange())
    return _Task(cluster, profile, GraphCosts(graph), free, wishes).plan()


IDLE, HELP = 0.1, 0.03  # ranks that would wait for such a part of a step must do so much of the work, at least
FEWER = 0.99  # of the time, at most, fewer nodes must take


@dataclass(frozen=True)
class _Wishes:
    batch: int
    cut: bool
    every: Every | None
    budget: float
    exchange: Exchange


@dataclass(frozen=True)
class _Deal:
    """What each node does in a step, the seconds of a step, and of one with its part of the exchanges."""

    lines: list[NodeOption | None]
    counts: list[list[int]]
    period: Period
    step_s: float
    exchange_s: float
    mean_s: float
    idle: dict[int, str]  # ranks that would wait for long, and why they are left out

    @cached_property
    def nodes(self) -> frozenset[int]:
        """Those that have samples."""
        return frozenset(index for index, samples in enumerate(self.counts) if any(samples))

    @cached_property
    def ranks(self) -> frozenset[int]:
        """Those that have samples."""
        return frozenset(rank for replica_option, _ in self.replica_options for rank in replica_option.ranks)

    @property
    def replica_options(self) -> list[tuple[ReplicaOption, int]]:
        """Those that have samples, and how many."""
        pairs = [
            zip(option.replica_options, own, strict=True)
            for option, own in zip(self.lines, self.counts, strict=True)
            if option
        ]
        return [(replica_option, samples) for pair in pairs for replica_option, samples in pair if samples]


@dataclass(frozen=True)
class _Task:
    cluster: Cluster
    profile: Profile
    graph_costs: GraphCosts
    free: tuple[int, ...]
    wishes: _Wishes

    def plan(self) -> Plan:
        self._require_memory()
        whole = self._deal(self._groups)
        deal = self._without_some_nodes(whole)
        step_s = deal.mean_s if isinstance(deal.period, EveryGradient) else deal.step_s
        return Plan(
            roles=self._roles(deal, self._reasons(deal, whole)),
            period=deal.period,
            exchange=self.wishes.exchange,
            replicas=self._replicas(deal),
            batch_size=self.batch,
            rebalance=True,
            graph=self.graph_costs.graph.fingerprint,
            predicted=Prediction(step_s=step_s, exchange_s=deal.exchange_s, is_measured=self.profile.is_measured),
        )

    @property
    def batch(self) -> int:
        return self.wishes.batch

    @cached_property
    def _kinds(self) -> dict[int, tuple[object, ...]]:
        """What tells one node from another: equal ones are planned once."""
        kinds = {}
        seen = [set(meeting.ranks) for meeting in self.profile.meetings]
        seen += [set(cut.ranks) for cut in self.profile.cuts]
        for index, node in enumerate(self.cluster.nodes):
            devices = [self.profile.devices[rank] for rank in node.ranks]
            told = [(d.step, d.averaging_s, d.alone, self.free[d.rank]) for d in devices]
            own = any(d.layers for d in devices) or any(known & set(node.ranks) for known in seen)
            kinds[index] = (*told, self.profile.rate(node.ranks), index if own else -1)
        return kinds

    @cached_property
    def _groups(self) -> Groups:
        firsts: dict[tuple[object, ...], int] = {}
        groups: Groups = {}
        for index in range(len(self.cluster.nodes)):
            groups.setdefault(firsts.setdefault(self._kinds[index], index), []).append(index)
        return groups

    @cached_property
    def _lines(self) -> dict[int, list[NodeOption]]:
        """The ways to use the first node of each group of equal ones."""
        given = (self.graph_costs, self.profile, self.free, self.batch)
        kinds: dict[int, Kinds] = {first: {} for first in self._groups}
        found = {first: single_options(self.cluster.nodes[first].ranks, *given, kinds[first]) for first in self._groups}
        seconds = self._least_s(found, self._groups) if self._most(found, self._groups) >= self.batch else 0.0
        for first in self._groups if self.wishes.cut else ():
            ranks = self.cluster.nodes[first].ranks
            samples = best(found[first], seconds)[0] if seconds else 0
            found[first] += cut_options(ranks, *given, kinds[first], seconds=seconds, samples=samples)
        return found

    def _most(self, lines: Mapping[int, Sequence[NodeOption]], groups: Groups) -> int:
        """Returns how many samples memory allows these nodes."""
        each = {first: max((sum(option.limits) for option in lines[first]), default=0) for first in groups}
        return sum(len(members) * each[first] for first, members in groups.items())

    def _least_s(self, lines: Mapping[int, Sequence[NodeOption]], groups: Groups) -> float:
        """Returns the least time in which these nodes together do the global batch."""
        able = partial(capacity, lines, groups)
        low, high = 0.0, 1e-3
        while able(high) < self.batch:
            low, high = high, high * 2
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if able(middle) >= self.batch else (middle, high)
        return high

    def _without_some_nodes(self, deal: _Deal) -> _Deal:
        """Returns the deal, or one of fewer nodes if its steps are clearly shorter, exchanges included."""
        if FEWER * deal.mean_s <= deal.step_s:
            return deal
        strong, able = (self._capacities(deal, seconds) for seconds in (deal.step_s, FEWER * deal.mean_s))
        far = distances(self.cluster, self.profile, self.graph_costs.exchanged_bytes(self.wishes.exchange))
        tried: dict[frozenset[int], _Deal | None] = {frozenset(strong): deal}

        def mean_of(nodes: frozenset[int]) -> float:
            if nodes not in tried:
                chosen = {first: [x for x in members if x in nodes] for first, members in self._groups.items()}
                groups = {first: members for first, members in chosen.items() if members}
                fast_s = min(FEWER * deal.mean_s, *(found.mean_s / FEWER for found in tried.values() if found))
                tried[nodes] = self._deal(groups) if self._may_take(fast_s, groups, nodes) else None
            found = tried[nodes]
            return found.mean_s if found is not None else float("inf")

        try_sets(strong, able, far, self.batch, mean_of)
        deals = [found for found in tried.values() if found is not None]
        least_s = min(found.mean_s for found in deals)
        fast = [found for found in deals if FEWER * found.mean_s <= least_s]
        return min(fast, key=lambda found: (-len(found.nodes), found.mean_s))

    def _may_take(self, mean_s: float, groups: Groups, nodes: Collection[int]) -> bool:
        """Returns whether these nodes could do the batch in a mean step of so long; a deal takes longer to find."""
        exchange_s = self._exchange_s(nodes)
        times = {"step_s": mean_s, "exchange_s": exchange_s}
        longer = mean_step_s(self._period(**times), self.wishes.exchange, **times) / mean_s  # more, in shorter steps
        return capacity(self._lines, groups, mean_s / longer / FEWER) >= self.batch

    def _capacities(self, deal: _Deal, seconds: float) -> dict[int, int]:
        """Returns the samples that each node that is used can do in some time."""
        each = {first: best(self._lines[first], seconds)[0] for first in self._groups}
        used = deal.nodes
        return {x: each[first] for first, members in self._groups.items() for x in members if x in used}

    def _reasons(self, deal: _Deal, whole: _Deal) -> dict[int, str]:
        """Returns why ranks have nothing to do in a deal, where `whole` is the one without regard to exchanges."""
        need = whole_need(self.graph_costs, self.profile.sample_bytes)
        busy, helped = deal.ranks, whole.ranks
        reasons = {}
        for index, node in enumerate(self.cluster.nodes):
            own = deal if index in deal.nodes else whole
            for rank in (rank for rank in node.ranks if rank not in busy):
                if own is whole and rank in helped:
                    reasons[rank] = costs_more(whole.mean_s, deal.mean_s)
                else:
                    given = (rank, own.step_s, node.ranks, self.profile, need, self.free)
                    reasons[rank] = own.idle.get(rank) or why_left_out(*given)
        return reasons

    def _deal(self, groups: Groups) -> _Deal:
        """Returns the line and samples of each of these nodes, for the least time of a step; equal ones do the same."""
        lines, counts, step_s = self._shared_out(self._lines, groups)
        idle = self._idle(lines, counts, step_s, groups)
        ways = {first: [way for way in own if idle.keys().isdisjoint(way.ranks)] for first, own in self._lines.items()}
        fewer = self._shared_out(ways, groups) if idle and self._most(ways, groups) >= self.batch else None
        if fewer is not None and fewer[2] <= (1 + 2 * HELP) * step_s:  # twice, as samples are whole
            lines, counts, step_s = fewer
        for first, members in groups.items():
            for index in members:
                if (option := lines[index]) is not None:
                    slots = zip(self.cluster.nodes[first].ranks, self.cluster.nodes[index].ranks, strict=True)
                    lines[index] = option.on(dict(slots))
        exchange_s = self._exchange_s({index for index, samples in enumerate(counts) if any(samples)})
        period = self._period(step_s, exchange_s)
        mean_s = mean_step_s(period, self.wishes.exchange, step_s=step_s, exchange_s=exchange_s)
        return _Deal(lines, counts, period, step_s, exchange_s, mean_s, idle)

    def _shared_out(
        self, ways: Mapping[int, Sequence[NodeOption]], groups: Groups
    ) -> tuple[list[NodeOption | None], list[list[int]], float]:
        """Returns the line of the first of equal nodes for each, the samples, and the least time of a step."""
        seconds = self._least_s(ways, groups)
        lines: list[NodeOption | None] = [None] * len(self.cluster.nodes)
        counts: list[list[int]] = [[]] * len(self.cluster.nodes)
        for first, members in groups.items():
            total, option, samples = best(ways[first], seconds)
            for index in members if total else ():
                lines[index], counts[index] = option, list(samples)
        trim(lines, counts, self.batch)
        return lines, counts, max(ends(lines, counts))

    def _idle(
        self, lines: Sequence[NodeOption | None], counts: Sequence[list[int]], step_s: float, groups: Groups
    ) -> dict[int, str]:
        """Returns ranks that would wait for much of every step and together do next to nothing of the work, and why.

        Samples are whole, so there may be no number of them that fills the time of a slow rank.
        """
        waiting = []
        for first, members in groups.items():
            option, slots = lines[members[0]], self.cluster.nodes[first].ranks
            for place, replica_option in enumerate(option.replica_options if option is not None else ()):
                samples = [counts[index][place] for index in members]
                part = option.end_s(place, max(samples)) / step_s if option is not None and any(samples) else 1.0
                if part < 1 - IDLE:
                    own = [slots.index(rank) for rank in replica_option.ranks]
                    ranks = [self.cluster.nodes[index].ranks[slot] for index in {first, *members} for slot in own]
                    told = f"it would be busy for {part:.0%} of a step only, and steps are hardly shorter with it"
                    waiting.append((sum(samples), ranks, told))
        idle: dict[int, str] = {}
        done = 0
        for work, ranks, told in sorted(waiting):
            done += work
            idle |= dict.fromkeys(ranks if done <= HELP * self.batch else (), told)
        return idle

    def _require_memory(self) -> None:
        most = self._most(self._lines, self._groups)
        if most >= self.batch:
            return
        need = whole_need(self.graph_costs, self.profile.sample_bytes)
        missing = need.fixed_bytes + need.sample_bytes * self.batch - sum(self.free)
        case = (
            f"together {missing / 1e9:.3g} GB too little" if missing > 0 else "no way to cut it fits into all of them"
        )
        raise SpecError(
            f"a global batch of {self.batch} samples was asked for, but the devices hold {most}: one device needs "
            f"{need.fixed_bytes / 1e9:.3g} GB for the network, whose largest layer is "
            f"{largest_layer(self.graph_costs.graph)!r}, and {need.sample_bytes / 1e6:.3g} MB a sample, and the "
            "devices have "
            f"{', '.join(f'{size / 1e9:.3g}' for size in sorted(set(self.free)))} GB, {case}. Use a smaller batch, or "
            "more memory."
        )

    def _exchange_s(self, nodes: Collection[int]) -> float:
        used = [node.ranks for index, node in enumerate(self.cluster.nodes) if index in nodes]
        return exchange_seconds(self.graph_costs.exchanged_bytes(self.wishes.exchange), used, self.profile)

    def _period(self, step_s: float, exchange_s: float) -> Period:
        every, exchange = self.wishes.every, self.wishes.exchange
        period = period_of("epoch" if every is None else every)
        if isinstance(period, Adaptive):
            return exchange.begun(period, step_s=step_s, exchange_s=exchange_s)
        if every is not None:
            return period
        transfer_s = exchange_s / exchange.fragments
        steps = exchange.affordable_steps(step_s=step_s, transfer_s=transfer_s, budget=self.wishes.budget)
        return EverySteps(steps) if exchange_s or exchange.fragments > 1 else period

    def _roles(self, deal: _Deal, reasons: Mapping[int, str]) -> tuple[Role, ...]:
        roles: dict[int, Role] = {}
        for index, node in enumerate(self.cluster.nodes):
            option = deal.lines[index]
            for replica_option, samples in zip(
                option.replica_options if option else (), deal.counts[index], strict=True
            ):
                computing = replica_option.compute_s(samples)
                most = replica_option.most_samples(self.free)
                for rank, seconds, need in zip(replica_option.ranks, computing, replica_option.needs, strict=True):
                    roles[rank] = self._role(
                        rank, index, samples=samples, compute_s=seconds,
                        memory_bytes=need.fixed_bytes + need.sample_bytes * samples,
                        most_samples=most if most < UNKNOWN else 0, free_bytes=self.free[rank],
                    )  # fmt: skip
            for rank in node.ranks:
                if rank in reasons:
                    roles[rank] = self._role(rank, index, left_out=reasons[rank])
        return tuple(roles[rank] for rank in range(self.cluster.world_size))

    def _role(self, rank: int, node: int, **fields: object) -> Role:
        return Role(rank=rank, node=node, device=self.cluster.device_of(rank).kind, **fields)

    def _replicas(self, deal: _Deal) -> tuple[Replica, ...]:
        if all(replica_option.layout is None for replica_option, _ in deal.replica_options):
            return ()
        whole = lay_out(self.graph_costs.graph, [1.0])
        return tuple(
            Replica(
                ranks=replica_option.ranks, layout=replica_option.layout or whole, reason=self._why_cut(replica_option)
            )
            for replica_option, _ in deal.replica_options
        )

    def _why_cut(self, replica_option: ReplicaOption) -> str:
        if replica_option.layout is None:
            return ""
        need = whole_need(self.graph_costs, self.profile.sample_bytes)
        return why_cut(replica_option.ranks, need, self.free, self._most_whole, self.batch)

    @cached_property
    def _most_whole(self) -> int:
        """The samples for which there is memory if every rank has a network of its own."""
        whole = {
            first: [way for way in own if all(replica_option.layout is None for replica_option in way.replica_options)]
            for first, own in self._lines.items()
        }
        return self._most(whole, self._groups)


def _free(cluster: Cluster, profile: Profile, given: Sequence[int] | None) -> tuple[int, ...]:
    if given is None:
        return tuple(device.free_bytes for device in profile.devices)
    is_list = isinstance(given, Sequence) and all(isinstance(size, int) and size > 0 for size in given)
    if not is_list or len(given) != cluster.world_size:
        raise SpecError(
            f"memory_bytes={given!r} was given for {cluster.world_size} ranks. Give one whole number above 0 for each."
        )
    return tuple(given)
