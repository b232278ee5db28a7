"""How a node can be used: replicas that average their gradients, and the samples they process in a given time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from evenly.planner.balance import largest
from evenly.planner.costs import GraphCosts, sum_seconds
from evenly.planner.groupings import Grouping, groupings
from evenly.planner.replica_options import ReplicaOption, eased, replica_options_of
from evenly.spec.profile import Profile

WORTH = 1.1  # a cut is only worked out if its lower bound is this many times faster


@dataclass(frozen=True)
class NodeOption:
    """The replicas of one node, the seconds that averaging adds to a step of each, and the most samples of each."""

    replica_options: tuple[ReplicaOption, ...]
    averaging_s: tuple[float, ...]
    limits: tuple[int, ...]
    kinds: tuple[int, ...]  # replicas of one kind are equally fast, in any option of the node

    @property
    def ranks(self) -> list[int]:
        """The ranks of all replicas."""
        return [rank for replica_option in self.replica_options for rank in replica_option.ranks]

    def samples(self, seconds: float, samples_by_kind: dict[int, int] | None = None) -> list[int]:
        """Returns the samples that each replica can process in this time; `samples_by_kind` is a cache."""
        samples_by_kind = {} if samples_by_kind is None else samples_by_kind
        for kind, replica_option, averaging, top in zip(
            self.kinds, self.replica_options, self.averaging_s, self.limits, strict=True
        ):
            if kind not in samples_by_kind:
                samples_by_kind[kind] = largest(replica_option.seconds, top, seconds - averaging)
        return [samples_by_kind[kind] for kind in self.kinds]

    def end_s(self, position: int, samples: int) -> float:
        """Returns the seconds after which a replica has processed its samples and averaged its gradients."""
        return self.replica_options[position].seconds(samples) + self.averaging_s[position]

    def least_s(self, samples: int) -> float:
        """Returns the least time for so many samples; infinite if they do not fit into memory."""
        if sum(self.limits) < samples:
            return float("inf")
        low, high = 0.0, 1e-3
        while sum(self.samples(high)) < samples:
            low, high = high, 2 * high
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(self.samples(middle)) >= samples else (middle, high)
        return high

    def on(self, ranks: Mapping[int, int]) -> "NodeOption":
        """Returns the same option with the ranks of another, equal node."""
        replica_options = [
            replace(replica_option, ranks=tuple(ranks[rank] for rank in replica_option.ranks))
            for replica_option in self.replica_options
        ]
        return replace(self, replica_options=tuple(replica_options))


Kinds = dict[tuple[object, ...], int]  # numbers the kinds of replicas of one node


def single_options(
    ranks: Sequence[int], graph_costs: GraphCosts, profile: Profile, free: Sequence[int], batch: int, kinds: Kinds
) -> list[NodeOption]:
    """Returns the options in which every rank holds a whole network."""
    return [
        option
        for grouping in groupings(_fastest_first(ranks, profile), cut=False)
        for option in _node_options(grouping, ranks, graph_costs, profile, free, batch, kinds, {})
    ]


def cut_options(
    ranks: Sequence[int],
    graph_costs: GraphCosts,
    profile: Profile,
    free: Sequence[int],
    batch: int,
    kinds: Kinds,
    *,
    seconds: float,
    samples: int,
) -> list[NodeOption]:
    """Returns the options with cut networks that may process clearly more than `samples` in `seconds`."""
    options: list[NodeOption] = []
    cache: OptionCache = {}
    for grouping in groupings(_fastest_first(ranks, profile)):
        if all(len(group) == 1 for group in grouping):
            continue
        each = max(1.0, samples / len(grouping))
        hoped_s = 1 / sum(1 / ideal_s(group, graph_costs, profile, each) for group in grouping) * samples / each
        if seconds and WORTH * hoped_s > seconds:
            continue
        options += _node_options(grouping, ranks, graph_costs, profile, free, batch, kinds, cache)
    return options


OptionCache = dict[tuple[object, ...], list[ReplicaOption]]


def _replica_options(
    ranks: tuple[int, ...],
    graph_costs: GraphCosts,
    profile: Profile,
    free: Sequence[int],
    samples: int,
    cache: OptionCache,
) -> list[ReplicaOption]:
    """Returns the ways in which ranks can hold one network; cached for equal ranks."""
    devices = profile.cut_devices(ranks)
    device_keys = [(device.step, device.rank if device.layers else -1, free[device.rank]) for device in devices]
    key = (*device_keys, samples)
    if key not in cache:
        cache[key] = replica_options_of(ranks, graph_costs, profile, free=free, samples=samples)
    return [replace(replica_option, ranks=ranks) for replica_option in cache[key]]


def _node_options(
    grouping: Grouping,
    node: Sequence[int],
    graph_costs: GraphCosts,
    profile: Profile,
    free: Sequence[int],
    batch: int,
    kinds: Kinds,
    cache: OptionCache,
) -> Iterator[NodeOption]:
    busy = [rank for group in grouping for rank in group]
    rate = profile.rate(busy)
    each = -(-batch // len(grouping))  # samples of a replica, if all are alike
    options_by_group = [
        [eased(option, busy, node) for option in _replica_options(group, graph_costs, profile, free, each, cache)]
        for group in grouping
    ]
    for number in range(max(len(options) for options in options_by_group)):
        replica_options = tuple(options[min(number, len(options) - 1)] for options in options_by_group)
        size = graph_costs.travelling_bytes // max(len(replica_option.ranks) for replica_option in replica_options)
        limits = tuple(min(batch, replica_option.most_samples(free)) for replica_option in replica_options)
        estimated = sum_seconds(size, len(replica_options), rate)
        averaging = tuple(
            estimated if replica_option.averaging_s is None or len(replica_options) < 2 else replica_option.averaging_s
            for replica_option in replica_options
        )
        if any(limits):
            kind_keys = [
                (_speed(replica_option), *rest)
                for replica_option, *rest in zip(replica_options, averaging, limits, strict=True)
            ]
            yield NodeOption(
                replica_options, averaging, limits, tuple(kinds.setdefault(kind, len(kinds)) for kind in kind_keys)
            )


def _speed(replica_option: ReplicaOption) -> tuple[object, ...]:
    """Returns a key of what the time of a replica depends on."""
    if replica_option.layout is None:
        return replica_option.profile.devices[replica_option.ranks[0]].step, replica_option.ease
    return (object(),)  # unlike any other


def _fastest_first(ranks: Sequence[int], profile: Profile) -> list[int]:
    return sorted(ranks, key=lambda rank: (profile.devices[rank].step.at(profile.batch_size), rank))


def ideal_s(ranks: Sequence[int], graph_costs: GraphCosts, profile: Profile, samples: float) -> float:
    """Returns a lower bound of the time of ranks together: work divided without loss, and the least bytes sent."""
    together = 1 / sum(1 / device.step.at(samples) for device in profile.cut_devices(ranks))
    if len(ranks) == 1:
        return together
    times, sizes = samples / profile.batch_size, graph_costs.bytes_around
    least = sum(min(times * before, 2 * weight, times * after) for before, weight, after in sizes)  # of each layer
    gathers = profile.meeting(ranks).gathers
    return together + len(sizes) * gathers.at(1) + max(0.0, gathers.at(least) - gathers.at(1))
