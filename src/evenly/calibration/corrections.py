"""How measured joint steps correct a Profile: the measurements of ranks, how long to measure, and the arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from evenly.spec import Cluster, Curve, DeviceProfile, Layout, Profile, deal

LEAST, MOST = 2, 40  # steps of a kind
LEAST_FACTOR, MOST_FACTOR = 0.5, 3.0  # joint steps over independent ones; beyond these bounds it is noise
ENOUGH = 8  # samples of a rank; fewer do not represent a large batch
CUT_NOISE = 0.05  # corrections, or computing times, of ranks that differ by less count as equal
TELLING = 2.0  # a large step must take this many times a small one to show the speed of joint steps


@dataclass(frozen=True)
class Joint:
    """A joint step of some ranks, and the part of it in which this rank computes."""

    seconds: float
    computing_s: float


@dataclass(frozen=True)
class CutTrial:
    """A network cut over ranks to try."""

    ranks: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True)
class CutResult:
    """What a trial measured on each of its ranks."""

    trial: CutTrial
    joints: tuple[Joint, ...]

    @property
    def step_s(self) -> float:
        """The seconds of a step."""
        return mean(joint.seconds for joint in self.joints)


@dataclass(frozen=True)
class SmallStep:
    """A joint step of `ranks` in which all have few samples; reported by the slowest."""

    ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class LargeStep:
    """A joint step of `ranks` with batches by their speed, as measured on one of them."""

    ranks: tuple[int, ...]
    samples: int  # of this rank
    seconds: float
    computing_s: float  # of this rank


@dataclass(frozen=True)
class RankSteps:
    """The joint steps measured by one rank."""

    small: tuple[SmallStep, ...] = ()
    factor: float = 1.0  # time of joint steps over that of independent ones
    alone: float = 1.0  # time while the others of the node are idle, over that of joint steps
    large: LargeStep | None = None
    lean_s: float | None = None  # a large step of the fastest rank in which the others have few samples


@dataclass(frozen=True)
class Expectation:
    """The step times that the profile predicts for one rank, and so how many steps to make, with how many samples."""

    rank: int
    cluster: Cluster
    profile: Profile
    enough_s: float  # for the steps of a kind

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return self.cluster.nodes[self.cluster.node_of(self.rank)].ranks

    @property
    def steps(self) -> list[Curve]:
        """The seconds of a step by samples, of every rank."""
        return [device.step for device in self.profile.devices]

    @property
    def few(self) -> list[int]:
        """The smallest measured batch of every rank."""
        return [step.sizes[0] for step in self.steps]

    @property
    def fastest(self) -> int:
        """The fastest rank of this node: it plans for all."""
        return min(self.node, key=self.pace)

    def pace(self, rank: int) -> tuple[float, int]:
        """Returns the sort key of ranks, the fastest first."""
        return self.steps[rank].at(self.profile.batch_size), rank

    def own_s(self, ranks: Sequence[int], rank: int, samples: int) -> float:
        """Returns the time of a rank's own step while these ranks work."""
        return self.profile.ease(rank, ranks, self.node) * self.steps[rank].at(samples)

    def samples_by_speed(self, ranks: Sequence[int]) -> list[int]:
        """Returns batches with which these ranks should finish together, and all nodes too if they share the example's
        batch by speed; within the time budget, and large enough to be informative."""
        batch = self.profile.batch_size
        pace = [1 / step.at(batch) for step in self.steps]
        part = sum(pace[rank] for rank in self.node) / sum(pace)
        samples = max(batch * part, min(batch, ENOUGH * len(ranks)))
        speeds = [pace[rank] for rank in ranks]
        expected_s = samples / batch / sum(speeds)
        samples *= min(1.0, self.enough_s / LEAST / expected_s)
        counts = deal(max(len(ranks), round(samples)), speeds)
        most = [max(self.steps[rank].sizes) for rank in ranks]  # so many fit into its memory when measured
        return [min(top, max(self.few[rank], count)) for rank, top, count in zip(ranks, most, counts, strict=True)]

    def leader(self, ranks: Sequence[int], sizes: Sequence[int]) -> int | None:
        """Returns the fastest rank, if it is faster than all others and would finish last if the others had few
        samples."""
        order = sorted(ranks, key=self.pace)
        if len(order) < 2 or self.steps[order[0]] == self.steps[order[1]]:
            return None
        own_s = self.own_s(ranks, order[0], sizes[list(ranks).index(order[0])])
        others_s = max(self.own_s(ranks, rank, self.few[rank]) for rank in order[1:])
        return order[0] if own_s > TELLING * others_s else None


def steps_to_make(expected_s: float, enough_s: float) -> int:
    """Returns how many steps fit into a time; one if a step takes longer."""
    return min(MOST, max(LEAST if expected_s <= enough_s else 1, round(enough_s / expected_s)))


def small_factor(small: Joint, *, own_s: float) -> float:
    """Returns how much longer than expected a rank computes in a joint step with few samples; never less than 1."""
    return _bounded(max(1.0, small.computing_s / own_s))


def large_factor(large: Joint, small: Joint, *, own_s: float, own_small_s: float, alone_s: float, ranks: int) -> float:
    """Returns how much longer than expected a rank computes in a joint step with many samples.

    Fixed costs of a step, such as a quota that recovers while the rank averages, are in the small step too: if the
    large one should take several times as long, the difference of the two counts. A rank is never faster in a joint
    step than alone.

    Args:
        large: the step with many samples.
        small: the one with few.
        own_s: the predicted time of the rank's own large step.
        own_small_s: the same for the small one.
        alone_s: the measured time of the large one while the others were idle.
        ranks: how many made the step; a single rank neither averages nor waits.
    """
    if ranks == 1:
        return _bounded(large.seconds / own_s)
    factor = large.computing_s / own_s
    if own_s > TELLING * own_small_s:
        factor = (large.computing_s - small.computing_s) / (own_s - own_small_s)
    return _bounded(max(factor, alone_s / own_s))


def alone_factor(alone_s: float, *, factor: float, own_s: float, ranks_of_node: int) -> float:
    """Returns the step time while the others of the node are idle, over that of a joint step; 1 at most."""
    return 1.0 if ranks_of_node == 1 else min(1.0, alone_s / (factor * own_s))


def correct_profile(profile: Profile, cluster: Cluster, rows: Sequence[RankSteps]) -> Profile:
    """Returns the corrected profile: first the speed of ranks in joint steps, then the cost of averaging.

    Ranks of a node whose steps are equally long count as one device and get the mean of their measurements.

    Args:
        profile: of devices that run independently.
        cluster: the nodes.
        rows: the measurements of each rank.
    """
    scaled = profile.model_copy(update={"devices": tuple(_in_step(profile, cluster, rows))})
    devices = list(scaled.devices)
    for node in cluster.nodes:
        for rank, averaging_s in _averaging(profile, node.ranks, added_by_averaging(scaled, node.ranks, rows)).items():
            devices[rank] = devices[rank].model_copy(update={"averaging_s": averaging_s})
    return scaled.model_copy(update={"devices": tuple(devices)})


def added_by_averaging(profile: Profile, node: Sequence[int], rows: Sequence[RankSteps]) -> dict[int, float]:
    """Returns the measured averaging cost of ranks of a node.

    Averaging cost = small joint step - the slowest rank's own step. In a large step it is the time that is neither the
    rank's own step nor waiting for a slower one. If the fastest rank also made steps in which the others had few
    samples, the mean of both counts: in training the others will have less work than by speed, but not next to none.
    """
    added: dict[int, float] = {}
    for rank in node:
        for small in rows[rank].small:
            own_s = profile.ease(rank, small.ranks, node) * profile.devices[rank].step.seconds[0]
            added[rank] = max(0.0, small.seconds - own_s)
    large_steps = {rank: large for rank in node if (large := rows[rank].large) is not None}
    longest_s = max((large.computing_s for large in large_steps.values()), default=0.0)
    for rank, large in large_steps.items():
        if len(large.ranks) == 1:
            continue
        own_s = profile.ease(rank, large.ranks, node) * profile.devices[rank].step.at(large.samples)
        added[rank] = max(0.0, large.seconds - own_s - (longest_s - large.computing_s))
        lean_s = rows[rank].lean_s
        if lean_s is not None:
            added[rank] = (added[rank] + min(added[rank], max(0.0, lean_s - own_s))) / 2
    return added


def measured_corrections(
    ranks: Sequence[int], joints: Sequence[Joint], expected_s: Sequence[float], profile: Profile
) -> tuple[float, ...]:
    """Returns for each rank of a cut network how much longer it computes in a step than its layers by themselves.

    Ranks whose steps are equally long get their mean. Small differences between all ranks are noise: then the
    corrections stay as they were.

    Args:
        ranks: the ranks.
        joints: the step as each of them measured it.
        expected_s: the sum of each rank's layers, corrected as the profile says; 0 for a rank without any.
        profile: of devices that run independently, with the corrections until now.
    """
    factors = {
        rank: joint.computing_s / seconds
        for rank, joint, seconds in zip(ranks, joints, expected_s, strict=True)
        if seconds > 0 and joint.computing_s > 0
    }
    known = profile.cut_corrections(ranks)
    if not factors:
        return known
    otherwise = mean(factors.values())
    means = [mean(factors.get(peer, otherwise) for peer in _alike(profile, ranks, rank)) for rank in ranks]
    if max(means) <= (1 + CUT_NOISE) * min(means):
        return known
    return tuple(_bounded(before * factor) for before, factor in zip(known or [1.0] * len(means), means, strict=True))


def _in_step(profile: Profile, cluster: Cluster, rows: Sequence[RankSteps]) -> list[DeviceProfile]:
    """Returns the devices with their speed in joint steps."""
    devices = list(profile.devices)
    for node in cluster.nodes:
        for rank in node.ranks:
            alike = [rows[peer] for peer in _alike(profile, node.ranks, rank)]
            factor, alone = mean(row.factor for row in alike), mean(row.alone for row in alike)
            devices[rank] = devices[rank].scaled(factor).model_copy(update={"alone": alone})
    return devices


def _averaging(profile: Profile, node: Sequence[int], added: Mapping[int, float]) -> dict[int, float]:
    """Returns the averaging cost of every rank of a node; empty for a node of one rank.

    A rank without a measurement takes that of the next slower one, or else of the slowest, scaled by their speeds.
    """
    batch, steps = profile.batch_size, [device.step for device in profile.devices]
    order = sorted(node, key=lambda rank: (steps[rank].at(batch), rank))
    averaging_s: dict[int, float] = {}
    for index, rank in enumerate(order if len(order) > 1 else ()):
        alike = [added[peer] for peer in _alike(profile, node, rank) if peer in added]
        reference = next(peer for peer in (*order[index:], *order[::-1]) if peer in added)
        averaging_s[rank] = (
            mean(alike) if alike else added[reference] * (steps[rank].at(batch) / steps[reference].at(batch))
        )
    return averaging_s


def _alike(profile: Profile, node: Sequence[int], rank: int) -> list[int]:
    """Returns the ranks of a node whose steps are as long as those of `rank`."""
    return [peer for peer in node if profile.devices[peer].step == profile.devices[rank].step]


def _bounded(factor: float) -> float:
    return min(MOST_FACTOR, max(LEAST_FACTOR, factor))
