"""Measurements: seconds of each device against the size of its work, memory, and the links between ranks."""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from evenly.errors import SpecError
from evenly.spec._value import Document, Value
from evenly.spec.cluster import Cluster
from evenly.spec.graph import Graph
from evenly.spec.layout import Layout, numbers_of

AT_LEAST = 0.5  # of proportional time, the least assumed for a size far beyond the measured ones
LEAST_S, MOST_S = 1e-15, 1e15  # seconds of anything; beyond is a typing error
Positive = Annotated[float, Field(gt=0)]


class Curve(Value):
    """Seconds against a size, interpolated linearly between measured sizes and extrapolated beyond the last."""

    sizes: tuple[Annotated[int, Field(gt=0)], ...] = Field(min_length=1)
    seconds: tuple[Annotated[float, Field(ge=LEAST_S, le=MOST_S)], ...]

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if len(self.sizes) != len(self.seconds):
            raise ValueError(f"{len(self.sizes)} sizes have {len(self.seconds)} times")
        if sorted(set(self.sizes)) != list(self.sizes):
            raise ValueError(f"the sizes {list(self.sizes)} must grow")
        return self

    def at(self, size: float) -> float:
        """Returns the seconds for any size; 0 for size 0."""
        if size <= 0:
            return 0.0
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) == 1:
            return seconds[0] * size / sizes[0]
        index = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        a, b = sizes[index - 1], sizes[index]
        interpolated = seconds[index - 1] + (seconds[index] - seconds[index - 1]) * (size - a) / (b - a)
        if size < sizes[0]:  # at least proportional, at most the time of the smallest measured size
            return min(max(interpolated, seconds[0] * size / sizes[0]), seconds[0])
        return interpolated if size <= sizes[-1] else self._beyond(size)

    def _beyond(self, size: float) -> float:
        """Returns the seconds of a size beyond all measured ones.

        The slope is taken from half the last size, or from the first: that between the last two may be flat or steep by
        chance.
        """
        last, last_s = self.sizes[-1], self.seconds[-1]
        half = max(0, bisect_right(self.sizes, last / 2) - 1)
        slopes = [(last_s - self.seconds[index]) / (last - self.sizes[index]) for index in {0, half}]
        return max(last_s + max(slopes) * (size - last), last_s, AT_LEAST * last_s * size / last)

    def scaled(self, factor: float) -> Self:
        """Returns the curve of a device on which everything takes `factor` times as long."""
        return type(self)(sizes=self.sizes, seconds=tuple(second * factor for second in self.seconds))


class LayerCurves(Value):
    """Forward and backward of one layer with some of its outputs, its inputs, or the samples of the batch."""

    outputs: Curve
    inputs: Curve
    samples: Curve

    def scaled(self, factor: float) -> Self:
        """Returns the curves of a device on which everything takes `factor` times as long."""
        curves = (self.outputs, self.inputs, self.samples)
        outputs, inputs, samples = (curve.scaled(factor) for curve in curves)
        return type(self)(outputs=outputs, inputs=inputs, samples=samples)


class DeviceProfile(Value):
    """The measurements of one rank's device."""

    rank: Annotated[int, Field(ge=0)]
    step: Curve = Field(description="a whole training step against samples")
    layers: dict[str, LayerCurves] = Field(default_factory=dict, description="by the layer's form; see Graph.form_of")
    free_bytes: Annotated[int, Field(ge=0)] = Field(default=0, description="0: not known")
    unit: Annotated[int, Field(ge=1)] = Field(default=1, description="the multiple of filters that it computes best")
    spread: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="of the middle half of repeated steps, over their mean; None: not known"
    )
    alone: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="step time while the others of its node are idle, over that while all work"
    )
    averaging_s: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="extra time of a step if gradients are averaged with faster ranks; None: not known"
    )

    def scaled(self, factor: float) -> Self:
        """Returns the device on which every step and layer takes `factor` times as long."""
        layers = {form: curves.scaled(factor) for form, curves in self.layers.items()}
        return self.model_copy(update={"step": self.step.scaled(factor), "layers": layers})


class Rate(Value):
    """The speed of a link: seconds = latency_s + bytes / bytes_per_s."""

    latency_s: Annotated[float, Field(ge=0, le=1e6)]
    bytes_per_s: Annotated[float, Field(ge=1e-3, le=1e21)]

    def seconds(self, size_bytes: float) -> float:
        """Returns how long a message takes."""
        return self.latency_s + size_bytes / self.bytes_per_s


class Link(Value):
    """The link from rank `source` to rank `target`."""

    source: Annotated[int, Field(ge=0)]
    target: Annotated[int, Field(ge=0)]
    rate: Rate

    @model_validator(mode="after")
    def _joins_two(self) -> Self:
        if self.source == self.target:
            raise ValueError(f"a link leads from rank {self.source} to itself; leave it out")
        return self


class CollectiveTimings(Value):
    """Seconds that these ranks need to sum a tensor, and to gather one, against its bytes."""

    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=2)
    sums: Curve
    gathers: Curve


class CutStep(Value):
    """A step of a network cut over these ranks: its time over the sum of its layers' and messages' times."""

    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=2)
    factor: Positive
    corrections: tuple[Positive, ...] = Field(
        default=(), description="for each rank: its computing time in such a step over the sum of its layers' times"
    )
    layout: Layout | None = Field(default=None, description="how the network was cut in that step")
    slower: tuple[Layout, ...] = Field(default=(), description="ways to cut it that took longer")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if len(self.corrections) not in (0, len(self.ranks)):
            raise ValueError(f"there are {len(self.corrections)} corrections for {len(self.ranks)} ranks")
        for layout in (*self.slower, *(() if self.layout is None else (self.layout,))):
            if len(layout.shares) != len(self.ranks):
                raise ValueError(f"a layout is for {len(layout.shares)} ranks, not for {len(self.ranks)}")
        return self


def _worst(rates: Sequence[Rate]) -> Rate:
    return Rate(latency_s=max(rate.latency_s for rate in rates), bytes_per_s=min(rate.bytes_per_s for rate in rates))


class Profile(Document):
    """The devices and links of a cluster, measured with one network and batch."""

    version: Literal[1] = 1
    cluster: str = Field(description="fingerprint of the cluster")
    graph: str = Field(description="fingerprint of the network and its example")
    batch_size: Annotated[int, Field(gt=0)] = Field(description="samples of the example")
    devices: tuple[DeviceProfile, ...] = Field(min_length=1)
    lanes: tuple[Link, ...] = Field(default=(), description="those that were measured")
    meetings: tuple[CollectiveTimings, ...] = Field(default=(), description="groups whose collectives were measured")
    cuts: tuple[CutStep, ...] = Field(
        default=(), description="the fastest step of each group of ranks that were tried with a network cut over them"
    )
    inside: Rate = Field(default=Rate(latency_s=2e-5, bytes_per_s=1e10), description="other links inside a node")
    across: Rate = Field(default=Rate(latency_s=1e-4, bytes_per_s=1.25e8), description="other links between nodes")
    sample_bytes: Annotated[int, Field(ge=0)] = Field(default=0, description="kept for backward for each sample")
    versions: str = Field(default="", description="of what it was measured with")
    is_measured: bool = True

    @model_validator(mode="after")
    def _one_device_for_each_rank(self) -> Self:
        ranks = [device.rank for device in self.devices]
        if ranks != list(range(len(ranks))):
            raise ValueError(f"devices must be given for ranks 0..{len(ranks) - 1} in order; they are for {ranks}")
        foreign_links = [link for link in self.lanes if max(link.source, link.target) >= len(ranks)]
        if foreign_links:
            raise ValueError(
                f"a link joins ranks {foreign_links[0].source} and {foreign_links[0].target} of {len(ranks)}"
            )
        return self

    @classmethod
    def from_speeds(
        cls,
        cluster: Cluster,
        graph: Graph,
        speeds: Sequence[float],
        *,
        flops_per_s: float = 1e12,
        inside: Rate | None = None,
        across: Rate | None = None,
    ) -> Self:
        """Returns a profile from given speeds, one for each rank in any unit, and given links.

        Args:
            cluster: the nodes and ranks.
            graph: the network.
            speeds: how fast the ranks are compared with each other; the fastest does `flops_per_s`.
            flops_per_s: floating-point operations of the fastest rank.
            inside: the links between ranks of a node; 10 GB/s if left out.
            across: the links between nodes; 1 Gbit/s if left out.
        """
        numbers = check_speeds(speeds, ranks=cluster.world_size)
        if not 0 < flops_per_s < float("inf"):
            raise SpecError(f"flops_per_s={flops_per_s} was given. Give the operations a second of the fastest rank.")
        batch = graph.batch_size
        flops = max(1.0, 3.0 * sum(layer.flops for layer in graph.layers))
        fastest = max(numbers)
        step_seconds = [flops / flops_per_s * (fastest / speed) for speed in numbers]
        if not LEAST_S <= min(step_seconds) <= max(step_seconds) <= MOST_S:
            raise SpecError(
                f"by speeds={list(speeds)} and flops_per_s={flops_per_s} a step takes from {min(step_seconds):g} to "
                f"{max(step_seconds):g} s, which no device does. Give speeds and operations a second as they are."
            )
        devices = []
        for rank, seconds in enumerate(step_seconds):
            step = Curve(sizes=(batch,), seconds=(seconds,))
            devices.append(DeviceProfile(rank=rank, step=step, free_bytes=cluster.device_of(rank).memory_bytes))
        rates = {name: rate for name, rate in (("inside", inside), ("across", across)) if rate is not None}
        return cls(
            cluster=cluster.fingerprint,
            graph=graph.fingerprint,
            batch_size=batch,
            devices=tuple(devices),
            **rates,
            sample_bytes=graph.sample_bytes,
            is_measured=False,
        )

    def ease(self, rank: int, busy: Iterable[int], node: Iterable[int]) -> float:
        """Returns the factor on a rank's time while only `busy` of its node work: 1 if all do.

        Devices of a node share memory, power, sometimes cores; each slows the others in proportion to its speed.
        """
        speed = {
            neighbour: 1.0 / self.devices[neighbour].step.at(self.batch_size) for neighbour in node if neighbour != rank
        }
        if not speed:
            return 1.0
        busy_fraction = sum(speed[neighbour] for neighbour in busy if neighbour != rank and neighbour in speed) / sum(
            speed.values()
        )
        return self.devices[rank].alone + (1.0 - self.devices[rank].alone) * busy_fraction

    def rate(self, ranks: Iterable[int]) -> Rate:
        """Returns the worst latency and bandwidth of the links among these ranks of a node."""
        members = set(ranks)
        rates = [link.rate for link in self.lanes if link.source in members and link.target in members]
        return _worst(rates) if rates else self.inside

    def rate_across(self, nodes: Sequence[Sequence[int]]) -> Rate:
        """Returns the worst latency and bandwidth of the links between the first ranks of nodes.

        With many nodes not all pairs are measured: a node without a measured link to the others uses those to any node.
        """
        ranks_by_leader = {ranks[0]: set(ranks) for ranks in nodes}
        links = [link for link in self.lanes if link.source in ranks_by_leader and link.target in ranks_by_leader]
        unmeasured = ranks_by_leader.keys() - {end for link in links for end in (link.source, link.target)}
        for link in self.lanes if unmeasured else ():
            ends = {link.source, link.target}
            links += [link for leader in ends & unmeasured if not ends <= ranks_by_leader[leader]]
        return _worst([link.rate for link in links]) if links else self.across

    def meeting(self, ranks: Iterable[int]) -> CollectiveTimings:
        """Returns the collective timings of these ranks: measured with them or a larger group, or estimated."""
        members = set(ranks)
        around = [meeting for meeting in self.meetings if members <= set(meeting.ranks)]
        if around:
            return min(around, key=lambda meeting: len(meeting.ranks))
        rate, num_others = self.rate(members), max(1, len(members) - 1)
        sizes = (1 << 10, 1 << 16, 1 << 20, 1 << 26)
        gathers = [num_others * rate.latency_s + size * num_others / len(members) / rate.bytes_per_s for size in sizes]
        curve = Curve(sizes=sizes, seconds=tuple(max(1e-12, seconds) for seconds in gathers))
        return CollectiveTimings(
            ranks=tuple(sorted(members)) if len(members) > 1 else (0, 0), sums=curve.scaled(2.0), gathers=curve
        )

    def cut_overhead(self, ranks: Iterable[int], *, otherwise: float) -> float:
        """Returns the `CutStep` factor measured with these ranks or a larger group, or `otherwise`."""
        cut = self._cut_around(ranks)
        return otherwise if cut is None else cut.factor

    def cut_corrections(self, ranks: Sequence[int]) -> tuple[float, ...]:
        """Returns the `CutStep` corrections of these ranks; empty if there are none."""
        cut = self._cut_around(ranks)
        if cut is None or not cut.corrections or len(ranks) == 1:
            return ()
        corrections = dict(zip(cut.ranks, cut.corrections, strict=True))
        return tuple(corrections[rank] for rank in ranks)

    def cut_devices(self, ranks: Sequence[int]) -> list[DeviceProfile]:
        """Returns the devices of ranks as fast as they are in a network cut over them."""
        devices = [self.devices[rank] for rank in ranks]
        corrections = self.cut_corrections(ranks) or [1.0] * len(devices)
        return [
            device if factor == 1 else device.scaled(factor)
            for device, factor in zip(devices, corrections, strict=True)
        ]

    def _cut_around(self, ranks: Iterable[int]) -> CutStep | None:
        """Returns the measured step of a network cut over these ranks, or over the smallest larger group."""
        members = set(ranks)
        around = [cut for cut in self.cuts if members <= set(cut.ranks)]
        return min(around, key=lambda cut: len(cut.ranks), default=None)

    @property
    def fingerprint(self) -> str:
        """Text that is equal for equal profiles."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def require_fit(self, cluster: Cluster, graph: Graph) -> None:
        """Raises `SpecError` unless the profile was measured on this cluster with this network."""
        if len(self.devices) != cluster.world_size:
            raise SpecError(
                f"a profile of {len(self.devices)} devices was given for a cluster of {cluster.world_size} ranks. "
                "Measure this one: evenly measure."
            )
        for subject, mine, theirs in (
            ("cluster", self.cluster, cluster.fingerprint),
            ("network, or an example of another size", self.graph, graph.fingerprint),
        ):
            if mine != theirs:
                raise SpecError(
                    f"the profile was measured with another {subject} (fingerprint {mine}, this one has {theirs}). "
                    "Measure this one: evenly measure."
                )


def check_speeds(speeds: object, *, ranks: int) -> list[float]:
    """Returns the speeds as numbers, or raises `SpecError` saying what is wrong with them."""
    numbers = list(numbers_of(speeds, "speeds"))
    if len(numbers) != ranks:
        raise SpecError(f"{len(numbers)} speeds {numbers} were given for {ranks} ranks. Give one for each rank.")
    bad = [speed for speed in numbers if not 0 < speed < float("inf")]
    if bad:
        raise SpecError(f"speeds={numbers} holds {bad}. Speeds are finite numbers above 0; leave a useless rank out.")
    return numbers
