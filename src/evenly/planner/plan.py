"""Cluster + Profile + Graph + settings -> Plan: the least time in which all devices together finish a global batch."""

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

BUDGET = 0.05  # default part of the time for exchanges between nodes
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
    """Returns the roles of all ranks for which a step over the global batch is shortest, exchanges included.

    Every node may use some or all of its ranks, each for itself with its own number of samples, or several holding one
    network together. For a time T it is known how many samples each node can do; the least T for which they are enough
    is found by bisection; where exchanges cost time, also for fewer nodes.

    Args:
        cluster: the nodes and ranks.
        profile: what was measured on them, or `Profile.from_speeds`.
        graph: the network, from `evenly.trace`.
        batch_size: samples of all ranks together in one step; by default those of the example.
        every: the period K'; by default so many steps that exchanges take no more than `exchange_budget`.
        cut: whether several ranks may hold one network together.
        exchange_budget: the part of the time that may go into exchanges between nodes.
        memory_bytes: what each rank may use; by default the profile's free memory.
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
    ranks = min(len(node.ranks) for node in cluster.nodes)
    copies = wishes.exchange.device_copies(ranks) if len(cluster.nodes) > 1 else 0.0
    return _Task(cluster, profile, GraphCosts(graph, exchange_copies=copies), free, wishes).plan()


IDLE, HELP = 0.1, 0.03  # ranks that wait for more than IDLE of a step must do at least HELP of the work
FEWER = 0.99  # fewer nodes must take at most this part of the time


@dataclass(frozen=True)
class _Wishes:
    batch: int
    cut: bool
    every: Every | None
    budget: float
    exchange: Exchange


@dataclass(frozen=True)
class _Deal:
    """The option and samples of each node, the seconds of a step, and its mean including exchanges."""

    options: list[NodeOption | None]
    counts: list[list[int]]
    period: Period
    step_s: float
    exchange_s: float
    mean_s: float
    idle: dict[int, str]  # ranks that would mostly wait, and why they are left out

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
            zip(option.replica_options, node_counts, strict=True)
            for option, node_counts in zip(self.options, self.counts, strict=True)
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
        unrestricted = self._deal(self._groups)
        deal = self._without_some_nodes(unrestricted)
        step_s = deal.mean_s if isinstance(deal.period, EveryGradient) else deal.step_s
        return Plan(
            roles=self._roles(deal, self._reasons(deal, unrestricted)),
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
        """A key of each node; nodes with equal keys are planned once."""
        kinds = {}
        measured_groups = [set(meeting.ranks) for meeting in self.profile.meetings]
        measured_groups += [set(cut.ranks) for cut in self.profile.cuts]
        for index, node in enumerate(self.cluster.nodes):
            devices = [self.profile.devices[rank] for rank in node.ranks]
            device_keys = [(d.step, d.averaging_s, d.alone, self.free[d.rank]) for d in devices]
            is_unique = any(d.layers for d in devices) or any(group & set(node.ranks) for group in measured_groups)
            kinds[index] = (*device_keys, self.profile.rate(node.ranks), index if is_unique else -1)
        return kinds

    @cached_property
    def _groups(self) -> Groups:
        firsts: dict[tuple[object, ...], int] = {}
        groups: Groups = {}
        for index in range(len(self.cluster.nodes)):
            groups.setdefault(firsts.setdefault(self._kinds[index], index), []).append(index)
        return groups

    @cached_property
    def _node_options(self) -> dict[int, list[NodeOption]]:
        """The options of the first node of each group of equal nodes."""
        arguments = (self.graph_costs, self.profile, self.free, self.batch)
        kinds: dict[int, Kinds] = {first: {} for first in self._groups}
        options = {
            first: single_options(self.cluster.nodes[first].ranks, *arguments, kinds[first]) for first in self._groups
        }
        seconds = self._least_s(options, self._groups) if self._most(options, self._groups) >= self.batch else 0.0
        for first in self._groups if self.wishes.cut else ():
            ranks = self.cluster.nodes[first].ranks
            samples = best(options[first], seconds)[0] if seconds else 0
            options[first] += cut_options(ranks, *arguments, kinds[first], seconds=seconds, samples=samples)
        return options

    def _most(self, options: Mapping[int, Sequence[NodeOption]], groups: Groups) -> int:
        """Returns the most samples that fit into the memory of these nodes."""
        each = {first: max((sum(option.limits) for option in options[first]), default=0) for first in groups}
        return sum(len(members) * each[first] for first, members in groups.items())

    def _least_s(self, options: Mapping[int, Sequence[NodeOption]], groups: Groups) -> float:
        """Returns the least time in which these nodes together process the global batch."""
        able = partial(capacity, options, groups)
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
                fast_s = min(
                    FEWER * deal.mean_s, *(candidate.mean_s / FEWER for candidate in tried.values() if candidate)
                )
                tried[nodes] = self._deal(groups) if self._may_take(fast_s, groups, nodes) else None
            candidate = tried[nodes]
            return candidate.mean_s if candidate is not None else float("inf")

        try_sets(strong, able, far, self.batch, mean_of)
        deals = [candidate for candidate in tried.values() if candidate is not None]
        least_s = min(candidate.mean_s for candidate in deals)
        fast = [candidate for candidate in deals if FEWER * candidate.mean_s <= least_s]
        return min(fast, key=lambda candidate: (-len(candidate.nodes), candidate.mean_s))

    def _may_take(self, mean_s: float, groups: Groups, nodes: Collection[int]) -> bool:
        """Returns whether these nodes may process the batch within this mean step; cheaper than `_deal`."""
        exchange_s = self._exchange_s(nodes)
        times = {"step_s": mean_s, "exchange_s": exchange_s}
        # exchanges lengthen shorter steps by a larger factor
        longer = mean_step_s(self._period(**times), self.wishes.exchange, **times) / mean_s
        return capacity(self._node_options, groups, mean_s / longer / FEWER) >= self.batch

    def _capacities(self, deal: _Deal, seconds: float) -> dict[int, int]:
        """Returns the samples that each used node can process in this time."""
        each = {first: best(self._node_options[first], seconds)[0] for first in self._groups}
        used = deal.nodes
        return {x: each[first] for first, members in self._groups.items() for x in members if x in used}

    def _reasons(self, deal: _Deal, unrestricted: _Deal) -> dict[int, str]:
        """Returns why ranks have no samples in a deal; `whole` is the deal that ignores exchanges."""
        need = whole_need(self.graph_costs, self.profile.sample_bytes)
        busy, helped = deal.ranks, unrestricted.ranks
        reasons = {}
        for index, node in enumerate(self.cluster.nodes):
            reference = deal if index in deal.nodes else unrestricted
            for rank in (rank for rank in node.ranks if rank not in busy):
                if reference is unrestricted and rank in helped:
                    reasons[rank] = costs_more(unrestricted.mean_s, deal.mean_s)
                else:
                    arguments = (rank, reference.step_s, node.ranks, self.profile, need, self.free)
                    reasons[rank] = reference.idle.get(rank) or why_left_out(*arguments)
        return reasons

    def _deal(self, groups: Groups) -> _Deal:
        """Returns the option and samples of each of these nodes for the shortest step; equal nodes do the same."""
        options, counts, step_s = self._distribute(self._node_options, groups)
        idle = self._idle(options, counts, step_s, groups)
        busy_options = {
            first: [option for option in node_options if idle.keys().isdisjoint(option.ranks)]
            for first, node_options in self._node_options.items()
        }
        is_possible = bool(idle) and self._most(busy_options, groups) >= self.batch
        fewer = self._distribute(busy_options, groups) if is_possible else None
        if fewer is not None and fewer[2] <= (1 + 2 * HELP) * step_s:  # twice, as samples are whole
            options, counts, step_s = fewer
        for first, members in groups.items():
            for index in members:
                if (option := options[index]) is not None:
                    slots = zip(self.cluster.nodes[first].ranks, self.cluster.nodes[index].ranks, strict=True)
                    options[index] = option.on(dict(slots))
        exchange_s = self._exchange_s({index for index, samples in enumerate(counts) if any(samples)})
        period = self._period(step_s, exchange_s)
        mean_s = mean_step_s(period, self.wishes.exchange, step_s=step_s, exchange_s=exchange_s)
        return _Deal(options, counts, period, step_s, exchange_s, mean_s, idle)

    def _distribute(
        self, options: Mapping[int, Sequence[NodeOption]], groups: Groups
    ) -> tuple[list[NodeOption | None], list[list[int]], float]:
        """Returns the option and samples of each node, and the least time of a step; ranks are the first node's."""
        seconds = self._least_s(options, groups)
        options_of_nodes: list[NodeOption | None] = [None] * len(self.cluster.nodes)
        counts: list[list[int]] = [[]] * len(self.cluster.nodes)
        for first, members in groups.items():
            total, option, samples = best(options[first], seconds)
            for index in members if total else ():
                options_of_nodes[index], counts[index] = option, list(samples)
        trim(options_of_nodes, counts, self.batch)
        return options_of_nodes, counts, max(ends(options_of_nodes, counts))

    def _idle(
        self, options: Sequence[NodeOption | None], counts: Sequence[list[int]], step_s: float, groups: Groups
    ) -> dict[int, str]:
        """Returns ranks that would mostly wait and together do almost none of the work, with the reason.

        Samples are whole, so a slow rank may be idle for much of a step with any number of them.
        """
        waiting = []
        for first, members in groups.items():
            option, slots = options[members[0]], self.cluster.nodes[first].ranks
            for position, replica_option in enumerate(option.replica_options if option is not None else ()):
                samples = [counts[index][position] for index in members]
                part = option.end_s(position, max(samples)) / step_s if option is not None and any(samples) else 1.0
                if part < 1 - IDLE:
                    local_slots = [slots.index(rank) for rank in replica_option.ranks]
                    ranks = [
                        self.cluster.nodes[index].ranks[slot] for index in {first, *members} for slot in local_slots
                    ]
                    reason = f"it would be busy for {part:.0%} of a step only, and steps are hardly shorter with it"
                    waiting.append((sum(samples), ranks, reason))
        idle: dict[int, str] = {}
        idle_samples = 0
        for work, ranks, reason in sorted(waiting):
            idle_samples += work
            idle |= dict.fromkeys(ranks if idle_samples <= HELP * self.batch else (), reason)
        return idle

    def _require_memory(self) -> None:
        most = self._most(self._node_options, self._groups)
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
            return exchange.with_affordable_start(period, step_s=step_s, exchange_s=exchange_s)
        if every is not None:
            return period
        transfer_s = exchange_s / exchange.fragments
        steps = exchange.affordable_steps(step_s=step_s, transfer_s=transfer_s, budget=self.wishes.budget)
        return EverySteps(steps) if exchange_s or exchange.fragments > 1 else period

    def _roles(self, deal: _Deal, reasons: Mapping[int, str]) -> tuple[Role, ...]:
        roles: dict[int, Role] = {}
        for index, node in enumerate(self.cluster.nodes):
            option = deal.options[index]
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
        uncut_layout = lay_out(self.graph_costs.graph, [1.0])
        return tuple(
            Replica(
                ranks=replica_option.ranks,
                layout=replica_option.layout or uncut_layout,
                reason=self._why_cut(replica_option),
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
        """The samples that fit into memory if every rank holds a whole network."""
        whole = {
            first: [
                option
                for option in node_options
                if all(replica_option.layout is None for replica_option in option.replica_options)
            ]
            for first, node_options in self._node_options.items()
        }
        return self._most(whole, self._groups)


def _free(cluster: Cluster, profile: Profile, memory_bytes: Sequence[int] | None) -> tuple[int, ...]:
    if memory_bytes is None:
        return tuple(device.free_bytes for device in profile.devices)
    is_list = isinstance(memory_bytes, Sequence) and all(isinstance(size, int) and size > 0 for size in memory_bytes)
    if not is_list or len(memory_bytes) != cluster.world_size:
        raise SpecError(
            f"memory_bytes={memory_bytes!r} was given for {cluster.world_size} ranks. Give one whole number above 0 "
            "for each."
        )
    return tuple(memory_bytes)
