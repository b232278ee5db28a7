"""Predicted seconds: layers on one device, a step of a cut network, sums over ranks and exchanges."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from evenly.layouts.graph_work import work_of
from evenly.layouts.preferred_units import PreferredUnits, preferred_units_of
from evenly.spec.exchange import Exchange
from evenly.spec.graph import Graph, Layer
from evenly.spec.layout import Choice, Layout, Move
from evenly.spec.profile import CollectiveTimings, DeviceProfile, Profile, Rate

FORWARD = 1 / 3  # of the time of a layer
BUCKETS_BYTES = 25 * 2**20  # in which DDP sends gradients


@dataclass(frozen=True)
class GraphCosts:
    """The operations of a network that take time, with a weight for those that were not measured by themselves."""

    graph: Graph
    layouts: dict[tuple[tuple[float, ...], bool], Layout] = field(default_factory=dict)  # by proportions of shares
    exchange_copies: float = 0.0  # of every parameter, which exchanges hold on a device while it trains

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """The operations that compute, by name."""
        return {layer.name: layer for layer in self.graph.layers if layer.kind not in ("source", "output")}

    @cached_property
    def kinds(self) -> dict[str, str]:
        """What makes each tensor: "parameter", or another operation."""
        return {tensor.name: layer.op for layer in self.graph.layers for tensor in layer.outputs}

    @cached_property
    def forms(self) -> dict[str, str]:
        """The form of every layer that can be measured by itself."""
        return {name: self.graph.form_of(layer) for name, layer in self.layers.items() if layer.is_measurable}

    @cached_property
    def weights(self) -> dict[str, float]:
        """Floating-point operations of forward and backward, those that only move memory included."""
        return {name: work_of(layer) for name, layer in self.layers.items()}

    @cached_property
    def bytes_around(self) -> list[tuple[int, int, int]]:
        """The bytes of input, weight and output of every layer that can be measured by itself."""
        tensors = self.graph.tensors
        layers = [layer for layer in self.layers.values() if layer.is_measurable]
        around = ((tensors[x.inputs[0]], tensors[x.inputs[1]], x.outputs[0]) for x in layers)
        return [(before.size_bytes, weight.size_bytes, after.size_bytes) for before, weight, after in around]

    @cached_property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters."""
        return self.graph.parameter_bytes

    @cached_property
    def travelling_bytes(self) -> int:
        """The bytes of all parameters as ranks send them: float32 at least."""
        parameters = [layer.outputs[0] for layer in self.graph.layers if layer.op == "parameter"]
        return sum(max(tensor.size_bytes, 4 * tensor.numel) for tensor in parameters)

    def exchanged_bytes(self, exchange: Exchange) -> int:
        """Returns the bytes of all parameters as an exchange sends them, coded or not."""
        return int(exchange.coded_fraction * self.travelling_bytes)

    @cached_property
    def preferred_units(self) -> PreferredUnits:
        """The units in which tensors should be cut."""
        return preferred_units_of(self.graph)

    def on(self, device: DeviceProfile) -> "DeviceCosts":
        """Returns the seconds of each operation on a device."""
        step_s = device.step.at(self.graph.batch_size)
        measured_forms = {name: form for name, form in self.forms.items() if form in device.layers}
        measured_s = sum(device.layers[form].outputs.seconds[-1] for form in measured_forms.values())
        unmeasured_weight = sum(weight for name, weight in self.weights.items() if name not in measured_forms)
        # layers one by one can take longer than together
        fitting = min(1.0, step_s / measured_s) if measured_s else 1.0
        per_weight = (step_s - fitting * measured_s) / unmeasured_weight if unmeasured_weight else 0.0
        return DeviceCosts(self, device, measured_forms, fitting, per_weight)


@dataclass(frozen=True)
class DeviceCosts:
    """The seconds of any part of each operation on one device."""

    graph_costs: GraphCosts
    device: DeviceProfile
    measured_forms: dict[str, str]
    fitting: float
    per_weight: float
    parts: dict[float, float] = field(default_factory=dict)  # cache of `_of_step`

    def of(self, name: str, mode: str, part: float, count: int) -> float:
        """Returns the seconds of `part` of an operation: `count` outputs, inputs or samples, as its mode says.

        A convolution with an odd number of channels takes as long as one with the next multiple that the device
        prefers; curves are measured at few sizes and do not show that.
        """
        form = self.measured_forms.get(name)
        if part <= 0:
            return 0.0
        if form is None:
            return self.graph_costs.weights[name] * self.per_weight * self._of_step(part)
        curves = self.device.layers[form]
        if mode == "bystander":
            return self.fitting * curves.samples.at(part * curves.samples.sizes[-1])
        curve, unit = curves.inputs if mode == "reduced" else curves.outputs, self.device.unit
        if self.graph_costs.layers[name].op == "conv" and unit < count < curve.sizes[-1]:
            count = min(-(-count // unit) * unit, curve.sizes[-1])
        return self.fitting * curve.at(count)

    def whole(self, name: str) -> float:
        """Returns the seconds of all of an operation."""
        form = self.measured_forms.get(name)
        if form is None:
            return self.graph_costs.weights[name] * self.per_weight
        return self.fitting * self.device.layers[form].outputs.seconds[-1]

    def _of_step(self, part: float) -> float:
        """Returns the fraction of a step's time that this fraction of its work takes; fixed costs make it larger."""
        if part not in self.parts:
            batch = self.graph_costs.graph.batch_size
            self.parts[part] = self.device.step.at(part * batch) / self.device.step.at(batch)
        return self.parts[part]


@dataclass(frozen=True)
class TimelineSegment:
    """The seconds each rank of a replica computes between two collectives, and those of the collective at the end."""

    seconds: tuple[float, ...]
    collective_s: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """A step of a replica: segments of work, each of which ends when its slowest rank does."""

    segments: tuple[TimelineSegment, ...]

    @cached_property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return sum(max(segment.seconds) + segment.collective_s for segment in self.segments)

    @cached_property
    def compute_s(self) -> list[float]:
        """Seconds in which each rank computes."""
        return [sum(part) for part in zip(*(segment.seconds for segment in self.segments), strict=True)]


def timeline_of(
    graph_costs: GraphCosts, layout: Layout, devices: Sequence[DeviceCosts], timings: CollectiveTimings
) -> Timeline:
    """Returns the step of a network with this layout over these devices, in the order of the layout's members."""
    choices = list(_choices_with_moves(graph_costs, layout))
    segments = [*_segments(choices, layout, devices, timings, forward=True)]
    earlier = [(choice, [move for move in moves if not _is_last(move, graph_costs)]) for choice, moves in choices]
    *others, last = _segments(earlier[::-1], layout, devices, timings, forward=False)
    moves_at_end = [move for _, moves in choices for move in moves if _is_last(move, graph_costs)]
    end_s = sum(_move_seconds(move, len(devices), timings, forward=False) for move in moves_at_end)
    return Timeline((*segments, *others, TimelineSegment(last.seconds, end_s)))


def _is_last(move: Move, graph_costs: GraphCosts) -> bool:
    """Whether the adjoint of a move waits for the end of backward: sums of gradients of parameters that are copied."""
    return move.name == "copy" and graph_costs.kinds.get(move.tensor) == "parameter"


def _choices_with_moves(graph_costs: GraphCosts, layout: Layout) -> Iterator[tuple[Choice, list[Move]]]:
    """Returns every choice with the moves that come before it."""
    moves = list(layout.moves)
    for choice in layout.choices:
        layer, before = graph_costs.layers.get(choice.layer), []
        while layer is not None and moves and moves[0].tensor in layer.inputs:
            before.append(moves.pop(0))
        yield choice, before


def _segments(
    choices: Sequence[tuple[Choice, list[Move]]],
    layout: Layout,
    devices: Sequence[DeviceCosts],
    timings: CollectiveTimings,
    *,
    forward: bool,
) -> Iterator[TimelineSegment]:
    size, portion = len(devices), FORWARD if forward else 1 - FORWARD
    compute_s = [0.0] * size
    for choice, moves in choices:
        choice_s = [portion * time for time in _seconds(choice, layout, devices)]
        if not forward:
            compute_s = [a + b for a, b in zip(compute_s, choice_s, strict=True)]
        for seconds in _collective_seconds(choice, moves, size, timings, forward=forward):
            yield TimelineSegment(tuple(compute_s), seconds)
            compute_s = [0.0] * size
        if forward:
            compute_s = [a + b for a, b in zip(compute_s, choice_s, strict=True)]
    yield TimelineSegment(tuple(compute_s))


def _collective_seconds(
    choice: Choice, moves: Sequence[Move], size: int, timings: CollectiveTimings, *, forward: bool
) -> Iterator[float]:
    """Returns the seconds of every collective of an operation."""
    others = max(1, size - 1)
    for move in moves:
        if move.forward_bytes if forward else move.backward_bytes:
            yield _move_seconds(move, size, timings, forward=forward)
    if choice.sent_bytes and choice.messages:
        each = choice.sent_bytes // choice.messages
        for _ in range(choice.messages - choice.messages // 2 if forward else choice.messages // 2):
            yield timings.gathers.at(each / others) if choice.mode == "units" else timings.sums.at(each / others / 2)


def _move_seconds(move: Move, size: int, timings: CollectiveTimings, *, forward: bool) -> float:
    """Returns the seconds of the collective of a move, or of its adjoint."""
    full = (move.forward_bytes if forward else move.backward_bytes) // max(1, size - 1)  # twice the tensor in a sum
    is_sum = move.name == ("reduce" if forward else "copy")
    return timings.sums.at(full / 2) if is_sum else timings.gathers.at(full)


def _seconds(choice: Choice, layout: Layout, devices: Sequence[DeviceCosts]) -> list[float]:
    """Returns the seconds of an operation on each member."""
    if choice.mode == "source" or not devices or choice.layer not in devices[0].graph_costs.layers:
        return [0.0] * len(devices)
    placements = choice.needs if choice.mode == "reduced" else (*choice.gives, *choice.needs)
    placement = next((placement for placement in placements if placement.state == "sharded"), None)
    if placement is None or choice.mode in ("whole", "summand"):
        return [times.whole(choice.layer) for times in devices]
    cut = layout.cuts[placement.cut]
    counts = cut.counts()
    mode = "bystander" if cut.rows else choice.mode
    return [times.of(choice.layer, mode, count / cut.size, count) for times, count in zip(devices, counts, strict=True)]


def sum_seconds(size_bytes: int, ranks: int, rate: Rate) -> float:
    """Returns the seconds of a sum over ranks of a tensor of this size, in a ring."""
    if ranks < 2 or not size_bytes:
        return 0.0
    messages = 1 + size_bytes // BUCKETS_BYTES
    return 2 * (ranks - 1) * (messages * rate.latency_s + size_bytes / ranks / rate.bytes_per_s)


def exchange_seconds(size_bytes: int, nodes: Sequence[Sequence[int]], profile: Profile) -> float:
    """Returns the seconds of an exchange between nodes with these ranks: across nodes, then inside each node."""
    if len(nodes) < 2:
        return 0.0
    across = sum_seconds(size_bytes, len(nodes), profile.rate_across(nodes))
    inside = [sum_seconds(size_bytes, len(ranks), profile.rate(ranks)) for ranks in nodes if len(ranks) > 1]
    return across + max(inside, default=0.0) / 2
