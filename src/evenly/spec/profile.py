"""What was measured: seconds of each device against the size of its work, memory, and the wires between ranks."""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from evenly.errors import SpecError
from evenly.spec._value import Document, Value
from evenly.spec.cluster import Cluster
from evenly.spec.graph import Graph
from evenly.spec.layout import numbers_of

AT_LEAST = 0.5  # of what is in proportion, a size far beyond those that were measured is taken to need
LEAST_S, MOST_S = 1e-15, 1e15  # seconds of anything; beyond is a slip of the pen
Positive = Annotated[float, Field(gt=0)]


class Curve(Value):
    """Seconds against a size, measured at some sizes; straight lines lie between them and go on beyond the last."""

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
        """Returns the seconds for any size; nothing takes no time."""
        if size <= 0:
            return 0.0
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) == 1:
            return seconds[0] * size / sizes[0]
        place = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        a, b = sizes[place - 1], sizes[place]
        line = seconds[place - 1] + (seconds[place] - seconds[place - 1]) * (size - a) / (b - a)
        if size < sizes[0]:  # never faster than in proportion, never slower than the smallest that was measured
            return min(max(line, seconds[0] * size / sizes[0]), seconds[0])
        return line if size <= sizes[-1] else self._beyond(size)

    def _beyond(self, size: float) -> float:
        """Returns the seconds of a size beyond all that were measured.

        The line goes on from a size of half the last one, or from the first: the last two may lie flat, or steep, by
        chance where they are close.
        """
        last, last_s = self.sizes[-1], self.seconds[-1]
        half = max(0, bisect_right(self.sizes, last / 2) - 1)
        slopes = [(last_s - self.seconds[place]) / (last - self.sizes[place]) for place in {0, half}]
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
    """What one rank's device was seen to do."""

    rank: Annotated[int, Field(ge=0)]
    step: Curve = Field(description="a whole training step against samples")
    layers: dict[str, LayerCurves] = Field(default_factory=dict, description="by the layer's form; see Graph.form_of")
    free_bytes: Annotated[int, Field(ge=0)] = Field(default=0, description="0: not known")
    unit: Annotated[int, Field(ge=1)] = Field(default=1, description="the multiple of filters that it likes")
    spread: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="of the middle half of repeated steps, over their mean; None: not known"
    )
    alone: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="the time of a step while the others of its node rest, over that while all work"
    )
    averaging_s: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="what a step takes more if gradients are averaged with faster ranks; None: not known"
    )

    def scaled(self, factor: float) -> Self:
        """Returns the device on which every step and layer takes `factor` times as long."""
        layers = {form: own.scaled(factor) for form, own in self.layers.items()}
        return self.model_copy(update={"step": self.step.scaled(factor), "layers": layers})


class Rate(Value):
    """What a wire does: seconds = latency_s + bytes / bytes_per_s."""

    latency_s: Annotated[float, Field(ge=0, le=1e6)]
    bytes_per_s: Annotated[float, Field(ge=1e-3, le=1e21)]

    def seconds(self, size_bytes: float) -> float:
        """Returns how long a message takes."""
        return self.latency_s + size_bytes / self.bytes_per_s


class Link(Value):
    """The way from rank `source` to rank `target`."""

    source: Annotated[int, Field(ge=0)]
    target: Annotated[int, Field(ge=0)]
    rate: Rate

    @model_validator(mode="after")
    def _joins_two(self) -> Self:
        if self.source == self.target:
            raise ValueError(f"a way leads from rank {self.source} to itself; leave it out")
        return self


class CollectiveTimings(Value):
    """Seconds that these ranks need to sum a tensor, and to gather one, against its bytes."""

    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=2)
    sums: Curve
    gathers: Curve


class CutStep(Value):
    """A step of a network cut over these ranks: what it took over what its layers and messages take one by one."""

    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=2)
    factor: Positive


def _worst(rates: Sequence[Rate]) -> Rate:
    return Rate(latency_s=max(rate.latency_s for rate in rates), bytes_per_s=min(rate.bytes_per_s for rate in rates))


class Profile(Document):
    """The devices and wires of a cluster, measured with one network and batch."""

    version: Literal[1] = 1
    cluster: str = Field(description="fingerprint of the cluster")
    graph: str = Field(description="fingerprint of the network and its example")
    batch_size: Annotated[int, Field(gt=0)] = Field(description="samples of the example")
    devices: tuple[DeviceProfile, ...] = Field(min_length=1)
    lanes: tuple[Link, ...] = Field(default=(), description="those that were measured")
    meetings: tuple[CollectiveTimings, ...] = Field(default=(), description="groups that were seen to sum and gather")
    cuts: tuple[CutStep, ...] = Field(default=(), description="steps of cut networks that were tried")
    inside: Rate = Field(default=Rate(latency_s=2e-5, bytes_per_s=1e10), description="other ways inside a node")
    across: Rate = Field(default=Rate(latency_s=1e-4, bytes_per_s=1.25e8), description="other ways between nodes")
    sample_bytes: Annotated[int, Field(ge=0)] = Field(default=0, description="kept for backward for each sample")
    versions: str = Field(default="", description="of what it was measured with")
    is_measured: bool = True

    @model_validator(mode="after")
    def _one_device_for_each_rank(self) -> Self:
        ranks = [device.rank for device in self.devices]
        if ranks != list(range(len(ranks))):
            raise ValueError(f"devices must be given for ranks 0..{len(ranks) - 1} in order; they are for {ranks}")
        strangers = [lane for lane in self.lanes if max(lane.source, lane.target) >= len(ranks)]
        if strangers:
            raise ValueError(f"a wire joins ranks {strangers[0].source} and {strangers[0].target} of {len(ranks)}")
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
        """Returns a profile from what is known: speeds in any unit, one for each rank, and what wires do.

        Args:
            cluster: the nodes and ranks.
            graph: the network.
            speeds: how fast the ranks are compared with each other; the fastest does `flops_per_s`.
            flops_per_s: floating-point operations of the fastest rank.
            inside: the wires between ranks of a node; 10 GB/s if left out.
            across: the wires between nodes; 1 Gbit/s if left out.
        """
        numbers = check_speeds(speeds, ranks=cluster.world_size)
        if not 0 < flops_per_s < float("inf"):
            raise SpecError(f"flops_per_s={flops_per_s} was given. Give the operations a second of the fastest rank.")
        batch = graph.batch_size
        flops = max(1.0, 3.0 * sum(layer.flops for layer in graph.layers))
        each = [flops / flops_per_s * (max(numbers) / speed) for speed in numbers]
        if not LEAST_S <= min(each) <= max(each) <= MOST_S:
            raise SpecError(
                f"by speeds={list(speeds)} and flops_per_s={flops_per_s} a step takes from {min(each):g} to "
                f"{max(each):g} s, which no device does. Give speeds and operations a second as they are."
            )
        devices = []
        for rank, seconds in enumerate(each):
            step = Curve(sizes=(batch,), seconds=(seconds,))
            devices.append(DeviceProfile(rank=rank, step=step, free_bytes=cluster.device_of(rank).memory_bytes))
        known = {name: rate for name, rate in (("inside", inside), ("across", across)) if rate is not None}
        return cls(
            cluster=cluster.fingerprint,
            graph=graph.fingerprint,
            batch_size=batch,
            devices=tuple(devices),
            **known,
            sample_bytes=graph.sample_bytes,
            is_measured=False,
        )

    def ease(self, rank: int, busy: Iterable[int], node: Iterable[int]) -> float:
        """Returns how much of its time a rank needs while only `busy` of its node work: 1 if all do.

        Devices of a node share memory, power, sometimes cores; what the others take away goes by how fast they are.
        """
        speed = {other: 1.0 / self.devices[other].step.at(self.batch_size) for other in node if other != rank}
        if not speed:
            return 1.0
        taken = sum(speed[other] for other in busy if other != rank and other in speed) / sum(speed.values())
        return self.devices[rank].alone + (1.0 - self.devices[rank].alone) * taken

    def rate(self, ranks: Iterable[int]) -> Rate:
        """Returns the worst latency and bandwidth of the wires among these ranks of a node."""
        own = set(ranks)
        found = [lane.rate for lane in self.lanes if lane.source in own and lane.target in own]
        return _worst(found) if found else self.inside

    def rate_across(self, nodes: Sequence[Sequence[int]]) -> Rate:
        """Returns the worst latency and bandwidth of the wires between the first ranks of nodes.

        Of many nodes not all pairs are measured: one with no known way to the others counts with those to any node.
        """
        homes = {ranks[0]: set(ranks) for ranks in nodes}
        found = [lane for lane in self.lanes if lane.source in homes and lane.target in homes]
        lonely = homes.keys() - {end for lane in found for end in (lane.source, lane.target)}
        for lane in self.lanes if lonely else ():
            ends = {lane.source, lane.target}
            found += [lane for first in ends & lonely if not ends <= homes[first]]
        return _worst([lane.rate for lane in found]) if found else self.across

    def meeting(self, ranks: Iterable[int]) -> CollectiveTimings:
        """Returns how these ranks sum and gather: as they, or a group around them, were seen to; or estimated."""
        own = set(ranks)
        around = [meeting for meeting in self.meetings if own <= set(meeting.ranks)]
        if around:
            return min(around, key=lambda meeting: len(meeting.ranks))
        rate, others = self.rate(own), max(1, len(own) - 1)
        sizes = (1 << 10, 1 << 16, 1 << 20, 1 << 26)
        gathers = [others * rate.latency_s + size * others / len(own) / rate.bytes_per_s for size in sizes]
        curve = Curve(sizes=sizes, seconds=tuple(max(1e-12, seconds) for seconds in gathers))
        return CollectiveTimings(
            ranks=tuple(sorted(own)) if len(own) > 1 else (0, 0), sums=curve.scaled(2.0), gathers=curve
        )

    def cut_factor(self, ranks: Iterable[int], *, otherwise: float) -> float:
        """Returns what a step of a network cut over ranks takes over its parts: as a group around them was seen to."""
        own = set(ranks)
        around = [cut for cut in self.cuts if own <= set(cut.ranks)]
        return min(around, key=lambda cut: len(cut.ranks)).factor if around else otherwise

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
        for what, mine, theirs in (
            ("cluster", self.cluster, cluster.fingerprint),
            ("network, or an example of another size", self.graph, graph.fingerprint),
        ):
            if mine != theirs:
                raise SpecError(
                    f"the profile was measured with another {what} (fingerprint {mine}, this one has {theirs}). "
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
