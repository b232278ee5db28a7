"""One replica: one rank, or several that hold one network together, and the seconds it takes for given samples."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import lcm

from evenly.layouts.layout import lay_out
from evenly.layouts.preferred_units import parts_of
from evenly.layouts.search import TransferCosts
from evenly.planner.balance import Seconds, balance
from evenly.planner.costs import DeviceCosts, GraphCosts, Timeline, timeline_of
from evenly.planner.memory import MemoryNeed, cut_needs, whole_need
from evenly.planner.memory_shares import fitting_shares
from evenly.spec.layout import Choice, Layout
from evenly.spec.profile import Profile

OVERHEAD = 1.12  # step of a cut network over the sum of its layers and messages, if not calibrated
LIKED = 1.03  # a block may take this much longer if filters then come in the multiples that devices prefer
MANY = 8  # samples per rank from which on a cut along the batch is fine enough


@dataclass(frozen=True)
class ReplicaOption:
    """Ranks that hold one network together; a layout if they are several."""

    ranks: tuple[int, ...]
    graph_costs: GraphCosts
    profile: Profile
    layout: Layout | None = None
    ease: float = 1.0  # part of its time that it needs while other ranks of its node are idle

    @cached_property
    def times(self) -> list[DeviceCosts]:
        """The seconds of each operation on each rank."""
        return [self.graph_costs.on(device) for device in self.profile.cut_devices(self.ranks)]

    @cached_property
    def timeline(self) -> Timeline:
        """A step with the samples of the example."""
        if self.layout is None:
            raise ValueError("a replica of one rank has no timeline")
        members = [self.times[position] for position in self.layout.members]
        return timeline_of(self.graph_costs, self.layout, members, self.profile.meeting(self.ranks))

    @cached_property
    def needs(self) -> list[MemoryNeed]:
        """The memory of each rank."""
        if self.layout is None:
            return [whole_need(self.graph_costs, self.profile.sample_bytes)]
        members = cut_needs(self.graph_costs, self.layout, self.profile.sample_bytes)
        needs_by_member = dict(zip(self.layout.members, members, strict=True))
        return [needs_by_member.get(position, MemoryNeed(0, 0)) for position in range(len(self.ranks))]

    def most_samples(self, free: Sequence[int]) -> int:
        """Returns the most samples that fit into the memory of every rank; `free` is by rank."""
        return min(need.samples_in(free[rank]) for rank, need in zip(self.ranks, self.needs, strict=True))

    @cached_property
    def averaging_s(self) -> float | None:
        """The seconds that averaging gradients with other replicas adds to a step; None if not measured."""
        seconds_of_ranks = [self.profile.devices[rank].averaging_s for rank in self.ranks]
        measured_s = [seconds for seconds in seconds_of_ranks if seconds is not None]
        return max(measured_s) / len(self.ranks) if len(measured_s) == len(seconds_of_ranks) else None

    @cached_property
    def overhead(self) -> float:
        """The ratio of a cut network's step to the sum of its layers and messages."""
        return self.profile.cut_overhead(self.ranks, otherwise=OVERHEAD)

    def seconds(self, samples: int) -> float:
        """Returns the seconds of a step with `samples` samples."""
        if self.layout is None:
            return self.ease * self.profile.devices[self.ranks[0]].step.at(samples)
        return self.overhead * self.ease * self.timeline.step_s * self._factor(samples)

    def compute_s(self, samples: int) -> list[float]:
        """Returns the seconds that each rank computes in such a step."""
        if self.layout is None:
            return [self.ease * self.profile.devices[self.ranks[0]].step.at(samples)]
        seconds_by_member = dict(zip(self.layout.members, self.timeline.compute_s, strict=True))
        return [
            seconds_by_member.get(position, 0.0) * self.overhead * self.ease * self._factor(samples)
            for position in range(len(self.ranks))
        ]

    def _factor(self, samples: int) -> float:
        """Returns the ratio of a step with so many samples to one with those of the example."""
        step = self.profile.devices[self.ranks[0]].step
        return step.at(samples) / step.at(self.profile.batch_size)


def eased(replica_option: ReplicaOption, busy: Sequence[int], node: Sequence[int]) -> ReplicaOption:
    """Returns the replica with its speed while only the `busy` ranks of its node work."""
    return replace(
        replica_option, ease=max(replica_option.profile.ease(rank, busy, node) for rank in replica_option.ranks)
    )


def replica_options_of(
    ranks: tuple[int, ...], graph_costs: GraphCosts, profile: Profile, *, free: Sequence[int] = (), samples: int = 0
) -> list[ReplicaOption]:
    """Returns the ways in which ranks can hold one network: cut by their speeds, and balanced block by block.

    If so many samples fit into the memory (`free`, by rank) of none of them, one cut by memory is added.
    """
    alone = ReplicaOption(ranks, graph_costs, profile)
    if len(ranks) == 1:
        return [alone]
    graph, batch = graph_costs.graph, profile.batch_size
    devices = profile.cut_devices(ranks)
    speeds = [1.0 / device.step.at(batch) for device in devices]
    flops = sum(graph_costs.weights.values())
    total = flops * sum(speeds)  # of all ranks together, a second
    gathers = profile.meeting(ranks).gathers
    small, large = gathers.at(1 << 10), gathers.at(1 << 22)
    per_byte = max(0.0, large - small) / (1 << 22) / (len(ranks) - 1) * len(ranks)  # of what one rank sends
    rates = TransferCosts(total * per_byte, total * small, total * small)
    even = len(set(speeds)) == 1 and not any(device.layers for device in devices)
    options = []
    for cut_batch in (True,) if batch >= MANY * len(ranks) else (False, True) if batch >= 2 else (False,):
        layout = _laid_out(graph_costs, speeds, rates, cut_batch=cut_batch)
        replica_option = ReplicaOption(ranks, graph_costs, profile, layout)
        options.append(replica_option)
        shares = {} if even else balanced_shares(graph_costs, layout, replica_option.times)
        if shares:
            better = lay_out(graph, speeds, rates=rates, cut_batch=cut_batch, layer_shares=shares)
            options.append(ReplicaOption(ranks, graph_costs, profile, better))
    for cut in profile.cuts:
        if cut.ranks == ranks and cut.layout is not None and cut.layout.graph == graph.fingerprint:
            slower = (cut.layout, *cut.slower)  # as was measured, whatever is predicted
            options = [option for option in options if option.layout not in slower]
            options.append(ReplicaOption(ranks, graph_costs, profile, cut.layout))
    if free and all(replica_option.most_samples(free) < samples for replica_option in options):
        options += _fitting(alone, speeds, rates, [free[rank] or math.inf for rank in ranks], samples)
    return options


def _fitting(
    alone: ReplicaOption, speeds: Sequence[float], rates: TransferCosts, free: Sequence[float], samples: int
) -> Iterator[ReplicaOption]:
    """Yields the replica with shares that fit into memory, if there are any; preferably also cut along the batch."""

    def option_of(shares: Sequence[float], cut_batch: bool) -> ReplicaOption:
        return replace(alone, layout=_laid_out(alone.graph_costs, shares, rates, cut_batch=cut_batch))

    for cut_batch in (True, False) if alone.graph_costs.graph.batch_size > 1 else (False,):

        def needs(shares: list[float], cut_batch: bool = cut_batch) -> list[float]:
            return [need.fixed_bytes + need.sample_bytes * samples for need in option_of(shares, cut_batch).needs]

        shares = fitting_shares(speeds, free, needs)
        if shares is not None:
            yield option_of(shares, cut_batch)
            return


def _laid_out(graph_costs: GraphCosts, speeds: Sequence[float], rates: TransferCosts, *, cut_batch: bool) -> Layout:
    """Returns the layout for ranks of these speeds; cached by the proportions of the speeds."""
    parts = tuple(round(speed / max(speeds), 6) for speed in speeds)
    key = (parts, cut_batch)
    if key not in graph_costs.layouts:
        graph_costs.layouts[key] = lay_out(graph_costs.graph, parts, rates=rates, cut_batch=cut_batch)
    return graph_costs.layouts[key]


def balanced_shares(graph_costs: GraphCosts, layout: Layout, times: Sequence[DeviceCosts]) -> dict[str, list[float]]:
    """Returns, for modules whose outputs are cut, the units of each rank for which all finish together.

    All layers with the same cut are balanced as one block: the time of a rank is the sum over them.
    """
    blocks: dict[int, list[tuple[str, str]]] = {}
    producers_by_cut: dict[int, list[Choice]] = {}
    for choice in layout.choices:
        if choice.mode in ("source", "whole", "summand") or choice.layer not in graph_costs.layers:
            continue
        placements = choice.needs[:1] if choice.mode == "reduced" else choice.gives
        placement = next((r for r in placements if r.state == "sharded" and not layout.cuts[r.cut].rows), None)
        if placement is not None:
            blocks.setdefault(placement.cut, []).append((choice.layer, choice.mode))
            if choice.mode in ("partitioned", "units") and choice.where:
                producers_by_cut.setdefault(placement.cut, []).append(choice)
    shares: dict[str, list[float]] = {}
    for number, producers in producers_by_cut.items():
        size, unit = layout.cuts[number].size, _unit(graph_costs, producers[0])
        if (
            size // unit < 2 or size % unit
        ):  # parts with different units (fused queries and fewer keys) are cut by speed
            continue
        counts = _dealt(blocks[number], size, unit, times)
        shares |= {choice.where: [float(count) for count in counts] for choice in producers}
    return shares


def _dealt(members: Sequence[tuple[str, str]], size: int, unit: int, times: Sequence[DeviceCosts]) -> list[int]:
    """Returns the filters of each rank, in the multiples that devices prefer if that costs almost nothing.

    Curves are measured at few sizes and do not show what odd ones cost.
    """
    candidates = {}
    for step in (unit, lcm(unit, *(costs.device.unit for costs in times))):
        if size % step == 0:
            seconds = [_block(members, size, step, costs) for costs in times]
            counts = balance(size // step, seconds)
            candidates[step] = max(act_s(count) for act_s, count in zip(seconds, counts, strict=True) if count), counts
    fine_s, _ = candidates[unit]
    step = max(step for step, (slowest, _) in candidates.items() if slowest <= LIKED * fine_s)
    return [count * step for count in candidates[step][1]]


def _unit(graph_costs: GraphCosts, maker: Choice) -> int:
    """Returns the unit, in filters, in which the outputs of a layer are cut."""
    placement = next(placement for placement in maker.gives if placement.state == "sharded")
    parts = parts_of(graph_costs.preferred_units, graph_costs.layers[maker.layer].outputs[0], placement.dim)
    return lcm(*(unit for _, unit in parts))


def _block(members: Sequence[tuple[str, str]], size: int, unit: int, costs: DeviceCosts) -> Seconds:
    @cache
    def seconds(count: int) -> float:
        return sum(costs.of(layer, mode, count * unit / size, count * unit) for layer, mode in members)

    return seconds
