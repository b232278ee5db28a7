"""One replica: a rank alone, or several that hold one network together, and the seconds it takes for some samples."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import lcm

from evenly.planner.balance import Seconds, balance
from evenly.planner.costs import Timeline, Times, Works, timeline_of
from evenly.planner.fitting import fitting_shares
from evenly.planner.layout import lay_out
from evenly.planner.memory import Need, cut_needs, whole_need
from evenly.planner.search import Rates
from evenly.planner.wishes import parts_of
from evenly.spec.layout import Choice, Layout
from evenly.spec.profile import Profile

OVERHEAD = 1.12  # what a step of a cut network takes over its layers and messages, where none was tried
LIKED = 1.03  # what a block may take longer to be dealt out in the multiples of filters that devices like
MANY = 8  # samples a rank, from which on a batch is divided finely enough


@dataclass(frozen=True)
class Crew:
    """Ranks that hold one network together; a layout if they are several."""

    ranks: tuple[int, ...]
    works: Works
    profile: Profile
    layout: Layout | None = None
    ease: float = 1.0  # what of its time it needs, as not all of its node work

    @cached_property
    def times(self) -> list[Times]:
        """What each rank takes for each operation."""
        return [self.works.on(self.profile.devices[rank]) for rank in self.ranks]

    @cached_property
    def timeline(self) -> Timeline:
        """A step with the samples of the example."""
        if self.layout is None:
            raise ValueError("a rank alone has no timeline")
        members = [self.times[place] for place in self.layout.members]
        return timeline_of(self.works, self.layout, members, self.profile.meeting(self.ranks))

    @cached_property
    def needs(self) -> list[Need]:
        """The memory of each rank."""
        if self.layout is None:
            return [whole_need(self.works, self.profile.sample_bytes)]
        members = cut_needs(self.works, self.layout, self.profile.sample_bytes)
        known = dict(zip(self.layout.members, members, strict=True))
        return [known.get(place, Need(0, 0)) for place in range(len(self.ranks))]

    def most_samples(self, free: Sequence[int]) -> int:
        """Returns the samples for which every rank has memory; `free` is by rank."""
        return min(need.samples_in(free[rank]) for rank, need in zip(self.ranks, self.needs, strict=True))

    @cached_property
    def averaging_s(self) -> float | None:
        """What averaging gradients with other crews adds to a step; None where that was not measured."""
        own = [self.profile.devices[rank].averaging_s for rank in self.ranks]
        known = [seconds for seconds in own if seconds is not None]
        return max(known) / len(self.ranks) if len(known) == len(own) else None

    @cached_property
    def overhead(self) -> float:
        """What a step of a cut network takes over what its layers and messages take one by one."""
        return self.profile.cut_factor(self.ranks, otherwise=OVERHEAD)

    def seconds(self, samples: int) -> float:
        """Returns what a step with `samples` samples takes."""
        if self.layout is None:
            return self.ease * self.profile.devices[self.ranks[0]].step.at(samples)
        return self.overhead * self.ease * self.timeline.step_s * self._factor(samples)

    def compute_s(self, samples: int) -> list[float]:
        """Returns what each rank computes of it."""
        if self.layout is None:
            return [self.ease * self.profile.devices[self.ranks[0]].step.at(samples)]
        found = dict(zip(self.layout.members, self.timeline.compute_s, strict=True))
        return [
            found.get(place, 0.0) * self.overhead * self.ease * self._factor(samples)
            for place in range(len(self.ranks))
        ]

    def _factor(self, samples: int) -> float:
        """Returns how much longer a step with so many samples takes than one with those of the example."""
        step = self.profile.devices[self.ranks[0]].step
        return step.at(samples) / step.at(self.profile.batch_size)


def eased(crew: Crew, busy: Sequence[int], node: Sequence[int]) -> Crew:
    """Returns a crew as fast as it is while only `busy` ranks of its node work."""
    return replace(crew, ease=max(crew.profile.ease(rank, busy, node) for rank in crew.ranks))


def crews_of(
    ranks: tuple[int, ...], works: Works, profile: Profile, *, free: Sequence[int] = (), samples: int = 0
) -> list[Crew]:
    """Returns the ways in which ranks can hold one network: cut by their speeds, and balanced block by block.

    If none of these has the memory (`free`, by rank) for so many samples, also cut as their memory allows it.
    """
    alone = Crew(ranks, works, profile)
    if len(ranks) == 1:
        return [alone]
    graph, batch = works.graph, profile.batch_size
    speeds = [1.0 / profile.devices[rank].step.at(batch) for rank in ranks]
    flops = sum(works.weights.values())
    total = flops * sum(speeds)  # of all ranks together, a second
    gathers = profile.meeting(ranks).gathers
    small, large = gathers.at(1 << 10), gathers.at(1 << 22)
    per_byte = max(0.0, large - small) / (1 << 22) / (len(ranks) - 1) * len(ranks)  # of what one rank sends
    rates = Rates(total * per_byte, total * small)
    even = len(set(speeds)) == 1 and not any(profile.devices[rank].layers for rank in ranks)
    found = []
    for cut_batch in (True,) if batch >= MANY * len(ranks) else (False, True) if batch >= 2 else (False,):
        layout = _laid_out(works, speeds, rates, cut_batch=cut_batch)
        crew = Crew(ranks, works, profile, layout)
        found.append(crew)
        shares = {} if even else balanced_shares(works, layout, crew.times)
        if shares:
            better = lay_out(graph, speeds, rates=rates, cut_batch=cut_batch, layer_shares=shares)
            found.append(Crew(ranks, works, profile, better))
    if free and all(crew.most_samples(free) < samples for crew in found):
        found += _fitting(alone, speeds, rates, [free[rank] or math.inf for rank in ranks], samples)
    return found


def _fitting(alone: Crew, speeds: Sequence[float], rates: Rates, free: Sequence[float], samples: int) -> Iterator[Crew]:
    """Yields the crew in shares for which there is memory, cut along the batch too if that fits, if not then not."""

    def crew_of(shares: Sequence[float], cut_batch: bool) -> Crew:
        return replace(alone, layout=_laid_out(alone.works, shares, rates, cut_batch=cut_batch))

    for cut_batch in (True, False) if alone.works.graph.batch_size > 1 else (False,):

        def needs(shares: list[float], cut_batch: bool = cut_batch) -> list[float]:
            return [need.fixed_bytes + need.sample_bytes * samples for need in crew_of(shares, cut_batch).needs]

        shares = fitting_shares(speeds, free, needs)
        if shares is not None:
            yield crew_of(shares, cut_batch)
            return


def _laid_out(works: Works, speeds: Sequence[float], rates: Rates, *, cut_batch: bool) -> Layout:
    """Returns the layout for ranks of these speeds; ranks of equal proportions have the one that was found first."""
    parts = tuple(round(speed / max(speeds), 6) for speed in speeds)
    key = (parts, cut_batch)
    if key not in works.layouts:
        works.layouts[key] = lay_out(works.graph, parts, rates=rates, cut_batch=cut_batch)
    return works.layouts[key]


def balanced_shares(works: Works, layout: Layout, times: Sequence[Times]) -> dict[str, list[float]]:
    """Returns, for modules whose outputs are cut, the units of each rank for which all finish together.

    All layers that follow one cut are balanced as one block: what a rank takes for it is the sum over them.
    """
    blocks: dict[int, list[tuple[str, str]]] = {}
    owners: dict[int, list[Choice]] = {}
    for choice in layout.choices:
        if choice.mode in ("source", "whole", "summand") or choice.layer not in works.layers:
            continue
        records = choice.needs[:1] if choice.mode == "reduced" else choice.gives
        record = next((r for r in records if r.state == "sharded" and not layout.cuts[r.cut].rows), None)
        if record is not None:
            blocks.setdefault(record.cut, []).append((choice.layer, choice.mode))
            if choice.mode == "partitioned" and choice.where:
                owners.setdefault(record.cut, []).append(choice)
    shares: dict[str, list[float]] = {}
    for number, makers in owners.items():
        size, unit = layout.cuts[number].size, _unit(works, makers[0])
        if size // unit < 2 or size % unit:  # parts of unlike units, as fused queries and fewer keys, go by speed
            continue
        counts = _dealt(blocks[number], size, unit, times)
        shares |= {choice.where: [float(count) for count in counts] for choice in makers}
    return shares


def _dealt(members: Sequence[tuple[str, str]], size: int, unit: int, times: Sequence[Times]) -> list[int]:
    """Returns the filters of each rank: in the multiples that devices like, where that costs next to nothing.

    Curves are measured at few sizes and do not show what odd ones cost.
    """
    found = {}
    for step in (unit, lcm(unit, *(own.device.unit for own in times))):
        if size % step == 0:
            seconds = [_block(members, size, step, own) for own in times]
            counts = balance(size // step, seconds)
            found[step] = max(act(count) for act, count in zip(seconds, counts, strict=True) if count), counts
    fine_s, _ = found[unit]
    step = max(step for step, (slowest, _) in found.items() if slowest <= LIKED * fine_s)
    return [count * step for count in found[step][1]]


def _unit(works: Works, maker: Choice) -> int:
    """Returns in how many filters at least the outputs of a layer are dealt out."""
    record = next(record for record in maker.gives if record.state == "sharded")
    parts = parts_of(works.wishes, works.layers[maker.layer].outputs[0], record.dim)
    return lcm(*(unit for _, unit in parts))


def _block(members: Sequence[tuple[str, str]], size: int, unit: int, own: Times) -> Seconds:
    @cache
    def seconds(count: int) -> float:
        return sum(own.of(layer, mode, count * unit / size, count * unit) for layer, mode in members)

    return seconds
