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
    kinds: tuple[int, ...]  # crews of one kind do the same in the same time, in whatever line of the node they are

    @property
    def ranks(self) -> list[int]:
        """The ranks of all crews."""
        return [rank for crew in self.crews for rank in crew.ranks]

    def samples(self, seconds: float, known: dict[int, int] | None = None) -> list[int]:
        """Returns how many samples each crew can do in this time; what is `known` of their kinds is not asked again."""
        known = {} if known is None else known
        for kind, crew, averaging, top in zip(self.kinds, self.crews, self.averaging_s, self.limits, strict=True):
            if kind not in known:
                known[kind] = largest(crew.seconds, top, seconds - averaging)
        return [known[kind] for kind in self.kinds]

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


Kinds = dict[tuple[object, ...], int]  # the numbers of the kinds of crews of one node


def single_lines(
    ranks: Sequence[int], works: Works, profile: Profile, free: Sequence[int], batch: int, kinds: Kinds
) -> list[Line]:
    """Returns the lines in which every rank is for itself."""
    return [
        line
        for formation in formations(_fastest_first(ranks, profile), cut=False)
        for line in _formed(formation, ranks, works, profile, free, batch, kinds, {})
    ]


def cut_lines(
    ranks: Sequence[int],
    works: Works,
    profile: Profile,
    free: Sequence[int],
    batch: int,
    kinds: Kinds,
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
        found += _formed(formation, ranks, works, profile, free, batch, kinds, known)
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
    kinds: Kinds,
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
            own = [(_speed(crew), *rest) for crew, *rest in zip(crews, averaging, limits, strict=True)]
            yield Line(crews, averaging, limits, tuple(kinds.setdefault(kind, len(kinds)) for kind in own))


def _speed(crew: Crew) -> tuple[object, ...]:
    """Returns what the time of a crew depends on."""
    if crew.layout is None:
        return crew.profile.devices[crew.ranks[0]].step, crew.ease
    return (object(),)  # like nothing else


def _fastest_first(ranks: Sequence[int], profile: Profile) -> list[int]:
    return sorted(ranks, key=lambda rank: (profile.devices[rank].step.at(profile.batch_size), rank))


def _hoped_s(ranks: Sequence[int], works: Works, profile: Profile, samples: float) -> float:
    """Returns less time than ranks could need together: work divided without loss, and the least that must travel."""
    together = 1 / sum(1 / profile.devices[rank].step.at(samples) for rank in ranks)
    if len(ranks) == 1:
        return together
    times, sizes = samples / profile.batch_size, works.bytes_around
    least = sum(min(times * before, 2 * weight, times * after) for before, weight, after in sizes)  # of each layer
    gathers = profile.meeting(ranks).gathers
    return together + len(sizes) * gathers.at(1) + max(0.0, gathers.at(least) - gathers.at(1))
