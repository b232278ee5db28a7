"""Which ranks take longer than the others, from what all ranks published: a rule without clock and store."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

from evenly.spec import Cluster, Plan

BEGINS = 1.5  # times the median of the others, in consecutive looks: a straggler
ENDS = 1.25  # below this it is none any more
LOOKS = 2  # consecutive looks that must agree
FIRST_LOOKS = 3  # say what unequal work costs
LEAST_RATIO = 0.01  # of times, for a rank that has next to no work
MATTERS = 0.05  # the excess is at least this part of a step, else nobody waits for it


class RankPace(NamedTuple):
    """How long one rank took for the steps after `first_step` up to `last_step`, in the mean."""

    number: int  # counts what the rank has published
    first_step: int
    last_step: int
    computing_s: float  # of one step
    step_s: float  # of one step, with everything


@dataclass(frozen=True)
class ComparedRanks:
    """The ranks that one rank is compared with."""

    ranks: tuple[int, ...]
    of: Literal["node", "devices"] = "node"


@dataclass(frozen=True)
class StragglerVerdict:
    """A rank has become a straggler, or is none any more; the fields are those of the event `Straggler`."""

    rank: int
    step: int
    factor: float
    since_step: int
    is_over: bool
    compared_with: Literal["node", "devices"]


class StragglerRule:
    """Judges the ranks look by look, with hysteresis."""

    def __init__(self, compared: Sequence[ComparedRanks]) -> None:
        """Compares each rank with those that `compared` has for it; with none, nothing is said about it."""
        self._states = [_RankState() for _ in compared]
        self._compared = compared

    def expect(self, works: Sequence[Sequence[float]]) -> None:
        """Allows unequal times for unequal work; each of `works` has a number for every rank, in any unit.

        A device does twice the work in at most twice the time, and often in less. So a rank with r times the work of
        the others is expected to take between 1 and r times their time: where in between, its first looks say.
        """
        for rank, state in enumerate(self._states):
            state.ratios = []
            for work in works:
                others = [work[other] for other in self._compared[rank].ranks]
                if others and (typical := median(others)) > 0:
                    state.least = min(state.least, work[rank] / typical)
                    state.most = max(state.most, work[rank] / typical)

    def look(self, paces: Sequence[RankPace | None]) -> list[StragglerVerdict]:
        """Returns what has changed; `paces` has the latest of each rank, None for those without one."""
        verdicts = [self._judge(rank, pace, paces) for rank, pace in enumerate(paces) if pace is not None]
        return [verdict for verdict in verdicts if verdict is not None]

    def _judge(self, rank: int, pace: RankPace, paces: Sequence[RankPace | None]) -> StragglerVerdict | None:
        compared, state = self._compared[rank], self._states[rank]
        others = [pace_of.computing_s for other in compared.ranks if (pace_of := paces[other]) is not None]
        if pace.number == state.number or not others or (typical_s := median(others)) <= 0:
            return None
        state.number = pace.number
        typical_s *= state.expected(pace.computing_s / typical_s)
        factor = pace.computing_s / typical_s
        if state.is_straggler:
            disagrees = factor < ENDS
        else:
            disagrees = factor > BEGINS and pace.computing_s - typical_s >= MATTERS * pace.step_s
        state.looks = state.looks + 1 if disagrees else 0
        if state.looks == 1 and not state.is_straggler:
            state.since_step = pace.first_step
        if state.looks < LOOKS:
            return None
        state.is_straggler, state.looks = not state.is_straggler, 0
        return StragglerVerdict(rank, pace.last_step, factor, state.since_step, not state.is_straggler, compared.of)


@dataclass
class _RankState:
    number: int = 0  # of the last pace that was judged
    is_straggler: bool = False
    looks: int = 0  # in a row that disagree with `is_straggler`
    since_step: int = 0
    least: float = 1.0  # times the time of the others, as far as its work explains it
    most: float = 1.0
    ratios: list[float] = field(default_factory=list)  # its time over that of the others, in the first looks

    def expected(self, ratio: float) -> float:
        """Returns the ratio of times that its work explains; `ratio` is that of this look."""
        if len(self.ratios) < FIRST_LOOKS:
            self.ratios.append(ratio)
        if len(self.ratios) < FIRST_LOOKS:
            return self.most
        return max(LEAST_RATIO, min(max(median(self.ratios), self.least), self.most))


def compared_ranks(cluster: Cluster) -> list[ComparedRanks]:
    """Returns those each rank is compared with: others of its node, else ranks elsewhere with the same device."""
    compared = []
    for rank in range(cluster.world_size):
        node = next(node for node in cluster.nodes if rank in node.ranks)
        if len(node.ranks) > 1:
            compared.append(ComparedRanks(tuple(other for other in node.ranks if other != rank)))
            continue
        device = _kind(cluster, rank)
        alike = [other for other in range(cluster.world_size) if other != rank and _kind(cluster, other) == device]
        compared.append(ComparedRanks(tuple(alike), of="devices"))
    return compared


def planned_work(plan: Plan) -> list[list[float]]:
    """Returns the work of each rank: its samples times its part of the network, and its predicted seconds if known."""
    samples = []
    for role in plan.roles:
        replica = plan.replica_of(role.rank)
        part = 1.0
        if replica is not None and (total := sum(replica.layout.shares)) > 0:
            part = replica.layout.shares[replica.ranks.index(role.rank)] / total
        samples.append((role.samples or 1) * part)
    seconds = [role.compute_s for role in plan.roles]
    return [samples, seconds] if all(seconds) else [samples]


def _kind(cluster: Cluster, rank: int) -> tuple[object, ...]:
    """Returns what two equal devices have in common; a CPU without a name is known by its cores."""
    device = cluster.device_of(rank)
    return (device.kind, device.name, device.cores)
