"""How a node can be used: crews that average their gradients, and how many samples they can do in some time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from evenly.planner.balance import largest
from evenly.planner.costs import Works, sum_seconds
from evenly.planner.formations import Formation, formations
from evenly.planner.replica import Crew, crews_of, eased
from evenly.spec.profile import Profile

WORTH = 1.1  # so many times as fast it must seem possible before a network is cut to find out


@dataclass(frozen=True)
class Line:
    """The crews of one node that average gradients together, what that costs a step, and what memory allows each."""

    crews: tuple[Crew, ...]
    averaging_s: tuple[float, ...]
    limits: tuple[int, ...]

    def samples(self, seconds: float) -> list[int]:
        """Returns how many samples each crew can do in this time."""
        each = zip(self.crews, self.averaging_s, self.limits, strict=True)
        return [largest(crew.seconds, top, seconds - averaging) for crew, averaging, top in each]

    def end_s(self, place: int, samples: int) -> float:
        """Returns when a crew has finished so many samples and averaged its gradients."""
        return self.crews[place].seconds(samples) + self.averaging_s[place]

    def least_s(self, samples: int) -> float:
        """Returns the least time for so many samples; infinite where memory does not allow them."""
        if sum(self.limits) < samples:
            return float("inf")
        low, high = 0.0, 1e-3
        while sum(self.samples(high)) < samples:
            low, high = high, 2 * high
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(self.samples(middle)) >= samples else (middle, high)
        return high

    def on(self, ranks: Mapping[int, int]) -> "Line":
        """Returns the same line with the ranks of another node that is equal."""
        crews = [replace(crew, ranks=tuple(ranks[rank] for rank in crew.ranks)) for crew in self.crews]
        return replace(self, crews=tuple(crews))


def single_lines(ranks: Sequence[int], works: Works, profile: Profile, free: Sequence[int], batch: int) -> list[Line]:
    """Returns the lines in which every rank is for itself."""
    return [
        line
        for formation in formations(_fastest_first(ranks, profile), cut=False)
        for line in _formed(formation, ranks, works, profile, free, batch, {})
    ]


def cut_lines(
    ranks: Sequence[int],
    works: Works,
    profile: Profile,
    free: Sequence[int],
    batch: int,
    *,
    seconds: float,
    samples: int,
) -> list[Line]:
    """Returns the lines in which ranks hold a network together, and may do clearly more than `samples` in `seconds`."""
    found: list[Line] = []
    known: Known = {}
    for formation in formations(_fastest_first(ranks, profile)):
        if all(len(crew) == 1 for crew in formation):
            continue
        each = max(1.0, samples / len(formation))
        hoped_s = 1 / sum(1 / _hoped_s(crew, works, profile, each) for crew in formation) * samples / each
        if seconds and WORTH * hoped_s > seconds:
            continue
        found += _formed(formation, ranks, works, profile, free, batch, known)
    return found


Known = dict[tuple[object, ...], list[Crew]]


def _crews(
    ranks: tuple[int, ...], works: Works, profile: Profile, free: Sequence[int], samples: int, known: Known
) -> list[Crew]:
    """Returns the ways in which ranks hold a network; equal ranks hold it in equal ways."""
    devices = [profile.devices[rank] for rank in ranks]
    own = [(device.step, device.rank if device.layers else -1, free[device.rank]) for device in devices]
    key = (*own, samples)
    if key not in known:
        known[key] = crews_of(ranks, works, profile, free=free, samples=samples)
    return [replace(crew, ranks=ranks) for crew in known[key]]


def _formed(
    formation: Formation,
    node: Sequence[int],
    works: Works,
    profile: Profile,
    free: Sequence[int],
    batch: int,
    known: Known,
) -> Iterator[Line]:
    busy = [rank for crew in formation for rank in crew]
    rate = profile.rate(busy)
    each = -(-batch // len(formation))  # samples of a crew, if all are alike
    ways = [[eased(way, busy, node) for way in _crews(crew, works, profile, free, each, known)] for crew in formation]
    for number in range(max(len(way) for way in ways)):
        crews = tuple(way[min(number, len(way) - 1)] for way in ways)
        size = works.travelling_bytes // max(len(crew.ranks) for crew in crews)
        limits = tuple(min(batch, crew.most_samples(free)) for crew in crews)
        estimated = sum_seconds(size, len(crews), rate)
        averaging = tuple(
            estimated if crew.averaging_s is None or len(crews) < 2 else crew.averaging_s for crew in crews
        )
        if any(limits):
            yield Line(crews, averaging, limits)


def _fastest_first(ranks: Sequence[int], profile: Profile) -> list[int]:
    return sorted(ranks, key=lambda rank: (profile.devices[rank].step.at(profile.batch_size), rank))


def _hoped_s(ranks: Sequence[int], works: Works, profile: Profile, samples: float) -> float:
    """Returns less time than ranks could need together: work divided without loss, and the least that must travel."""
    together = 1 / sum(1 / profile.devices[rank].step.at(samples) for rank in ranks)
    if len(ranks) == 1:
        return together
    layers = [layer for layer in works.layers.values() if layer.is_measurable]
    tensors, times = works.graph.tensors, samples / profile.batch_size
    sizes = [
        (tensors[x.inputs[0]].size_bytes, tensors[x.inputs[1]].size_bytes, x.outputs[0].size_bytes) for x in layers
    ]
    least = sum(min(times * before, 2 * weight, times * after) for before, weight, after in sizes)  # of each layer
    gathers = profile.meeting(ranks).gathers
    return together + len(layers) * gathers.at(1) + max(0.0, gathers.at(least) - gathers.at(1))
