"""The cheapest placements of all tensors of a network: a search along its operations that keeps the best few paths.

At every operation, paths differ only in the states of tensors that are still needed. For chains and residual networks
these are few, and the search finds the shortest path; where very many tensors are alive (dense blocks) it is a beam
search.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from evenly.errors import SpecError
from evenly.layouts.cuts import DimCuts
from evenly.layouts.graph_work import work_of
from evenly.layouts.layer_context import LayerContext, LayerOption, State
from evenly.layouts.preferred_units import PreferredUnits, channels_of, preferred_units_of
from evenly.layouts.recurrent_units import sizes_of
from evenly.layouts.rules import options_of
from evenly.spec.cluster import Device
from evenly.spec.graph import Graph, Layer, Tensor
from evenly.spec.layout import COPIED, PARTIAL, REPLICATED, Choice, Move, MoveName, Segments, TensorPlacement

Placed = tuple[int, tuple[Segments, ...]] | None  # dim and index ranges of each rank; None: every rank has all of it

WEIGHTED = {"conv", "linear", "embedding"}  # computed whole only if there is no other option
FORBIDDEN = 1e18
BEAM = 48


@dataclass(frozen=True)
class TransferCosts:
    """The cost of moving compared with computing, in floating-point operations of all devices together."""

    flops_per_byte: float = 100.0  # sent by one rank
    flops_per_message: float = 2e4
    flops_per_step_message: float = 2e7  # one for each step of a recurrent layer: every rank waits for it

    @classmethod
    def of_devices(cls, devices: Iterable[Device]) -> Self:
        """Returns the costs to assume for these devices if nothing was measured.

        GPUs compute much between two messages, and a recurrent layer that is cut by units cannot use cuDNN.
        """
        has_gpu = any(device.kind == "cuda" for device in devices)
        return cls(flops_per_step_message=5e10) if has_gpu else cls()


@dataclass(frozen=True)
class SearchStep:
    """One option to compute a layer: the states of its tensors afterwards, its moves and its costs."""

    states: Mapping[str, State]
    choice: Choice
    moves: tuple[Move, ...] = ()
    costs: tuple[float, ...] = ()

    def cost_after(self, cost: float) -> float:
        """Returns the cost of a path of this cost after this step."""
        for part in self.costs:
            cost += part
        return cost


@dataclass(frozen=True)
class SearchPath:
    """The choices for all operations up to some operation."""

    cost: float
    states: Mapping[str, State]  # of tensors that are needed later
    parent: "SearchPath | None" = None
    step: SearchStep | None = None

    def steps(self) -> list[SearchStep]:
        """Returns all steps of this path in order."""
        steps, path = [], self
        while path.step is not None and path.parent is not None:
            steps.append(path.step)
            path = path.parent
        return steps[::-1]


@dataclass
class Search:
    """The search for the cheapest path through a graph."""

    graph: Graph
    cuts: DimCuts
    rates: TransferCosts
    allowed: Mapping[str, Sequence[str]]
    shares: Mapping[str, tuple[float, ...]]  # of tensors whose layer has its own
    cut_batch: bool = True  # whether all layers may be cut along the batch, or only recurrent ones
    placed: Mapping[str, Placed] = field(default_factory=dict)  # how parameters and buffers are cut already, by name
    tensors: dict[str, Tensor] = field(init=False)
    preferred_units: PreferredUnits = field(init=False)
    channels: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors, self.preferred_units = self.graph.tensors, preferred_units_of(self.graph)
        self.channels = channels_of(self.graph)
        self.batches = self._batches() if self.cuts.batch else {}
        self._choices: dict[tuple[str, LayerOption], Choice] = {}
        self._moves: dict[tuple[str, str, TensorPlacement, TensorPlacement], Move] = {}
        self._work_of: dict[tuple[str, bool], float] = {}
        self.size = len(self.cuts.shares)
        self.slowdown = sum(self.cuts.shares) / min(self.cuts.shares)  # of work that every rank repeats

    def _batches(self) -> dict[str, TensorPlacement]:
        """Returns how every tensor is cut if the inputs are cut along the batch, where rules allow it."""
        placements: dict[str, TensorPlacement] = {}
        for layer in self.graph.layers:
            if layer.op == "input" and layer.outputs and layer.outputs[0].shape[:1] == (self.cuts.batch,):
                placements[layer.outputs[0].name] = TensorPlacement("sharded", 0, self.cuts.of_batch())
            if not any(name in placements for name in layer.inputs):
                continue
            states: list[State] = [frozenset([placements[n]]) if n in placements else None for n in layer.inputs]
            for option in options_of(self._context(layer, states, {})):
                output_placements = [r for r in option.gives if r.state == "sharded" and self.cuts.table[r.cut].rows]
                if len(output_placements) == len(layer.outputs) and output_placements:
                    placements.update(zip((tensor.name for tensor in layer.outputs), output_placements, strict=True))
        return placements

    def run(self) -> SearchPath:
        """Returns the cheapest path through the whole network."""
        last = {name: number for number, layer in enumerate(self.graph.layers) for name in layer.inputs}

        def needed(states: Mapping[str, State], number: int) -> dict[str, State]:
            return {name: state for name, state in states.items() if last.get(name, -1) > number}

        paths = [SearchPath(0.0, {})]
        for number, layer in enumerate(self.graph.layers):
            if layer.kind == "source":
                (step,) = self.steps(layer, ())
                new_states = needed(step.states, number)
                paths = [
                    SearchPath(path.cost, {**path.states, **new_states} if new_states else path.states, path, step)
                    for path in paths
                ]
                continue
            best_paths: dict[frozenset[tuple[str, State]], SearchPath] = {}
            steps_by_states: dict[tuple[State, ...], list[tuple[SearchStep, dict[str, State]]]] = {}
            for path in paths:
                input_states = tuple(map(path.states.get, layer.inputs))
                if input_states not in steps_by_states:  # steps depend on nothing else of the path
                    steps_by_states[input_states] = [
                        (step, needed(step.states, number)) for step in self.steps(layer, input_states)
                    ]
                carried_states = needed(path.states, number)
                for step, new_states in steps_by_states[input_states]:
                    next_path = SearchPath(step.cost_after(path.cost), {**carried_states, **new_states}, path, step)
                    key = frozenset(next_path.states.items())
                    if key not in best_paths or next_path.cost < best_paths[key].cost:
                        best_paths[key] = next_path
            if not best_paths:
                raise SpecError(
                    f"the operation {layer.name!r} ({layer.where or layer.op}) was to run as "
                    f"{list(self.allowed.get(layer.name, []))}, which its inputs do not allow. Allow it other modes."
                )
            paths = sorted(best_paths.values(), key=lambda w: w.cost)[:BEAM]
        return paths[0]

    def steps(self, layer: Layer, input_states: Sequence[State]) -> list[SearchStep]:
        """Returns every step that computes this layer from inputs in these states."""
        if layer.kind == "source":
            is_free = (
                layer.op in ("parameter", "buffer") and layer.where not in self.placed
            )  # placed at their first use
            states: dict[str, State] = (
                {} if is_free else {t.name: frozenset([self._placement(layer, t)]) for t in layer.outputs}
            )
            return [
                SearchStep(states, Choice(layer=layer.name, mode="source", gives=(REPLICATED,) * len(layer.outputs)))
            ]
        may_cut_batch = self.cut_batch or layer.op == "recurrent"
        context = self._context(layer, input_states, self.batches if may_cut_batch else {})
        options = [option for option in options_of(context) if self._allows(layer, option)]
        return [step for option in options if (step := self.take(context, option)) is not None]

    def _placement(self, layer: Layer, tensor: Tensor) -> TensorPlacement:
        """Returns how a source is placed from the start."""
        placed = self.placed.get(layer.where) if layer.op in ("parameter", "buffer") else None
        if placed is None:
            return REPLICATED
        dim, segments = placed
        return TensorPlacement("sharded", dim, self.cuts.add(tensor.shape[dim], segments))

    def _context(self, layer: Layer, states: Sequence[State], batches: Mapping[str, TensorPlacement]) -> LayerContext:
        inputs = tuple(self.tensors[name] for name in layer.inputs)
        return LayerContext(
            layer,
            inputs,
            tuple(states),
            self.cuts,
            self.preferred_units,
            self.channels,
            batches,
            self.shares,
            has_placed=bool(self.placed),
        )

    def _allows(self, layer: Layer, option: LayerOption) -> bool:
        modes = self.allowed.get(layer.name)
        return modes is None or option.mode in modes

    def take(self, context: LayerContext, option: LayerOption) -> SearchStep | None:
        """Returns the step that computes a layer in this mode; None if an input cannot be redistributed as needed."""
        states: dict[str, State] = dict(zip(context.layer.inputs, context.states, strict=True))
        moves: list[Move] = []
        changed_names = _changed_names(context.layer)
        for tensor, need in zip(context.inputs, option.needs, strict=True):
            state = states[tensor.name]
            is_fixed = "." in tensor.name or tensor.name in changed_names  # of a module that is called, or a buffer
            if is_fixed and state is not None and need not in state and not (need == COPIED and REPLICATED in state):
                return None
            reached = self.reach(tensor, state, need)
            if reached is None:
                return None
            states[tensor.name], tensor_moves = reached
            moves += tensor_moves
        sent = (self.size - 1) * (2 * option.summed * _summed_width(context) + option.gathered * _width(context))
        per_message = self.rates.flops_per_step_message if option.mode == "units" else self.rates.flops_per_message
        inside = sent / self.size * self.rates.flops_per_byte + option.messages * per_message
        for tensor, placement in zip(context.layer.outputs, option.gives, strict=True):
            states[tensor.name] = frozenset([placement])
        costs = (self._work(context, option), sum(self._price(move) for move in moves), inside)
        return SearchStep(states, self._choice(context.layer, option, sent), tuple(moves), costs)

    def _choice(self, layer: Layer, option: LayerOption, sent: int) -> Choice:
        key = (layer.name, option)
        if key not in self._choices:
            self._choices[key] = Choice.model_construct(
                layer=layer.name,
                mode=option.mode,
                op=layer.op,
                where=layer.where,
                needs=option.needs,
                gives=option.gives,
                messages=option.messages if self.size > 1 else 0,
                sent_bytes=sent,
                note=self._note(layer) if option.is_whole else layer.note,
            )
        return self._choices[key]

    def _note(self, layer: Layer) -> str:
        """Returns why an operation is computed whole; an empty text if it is one that follows the cut of its inputs."""
        if layer.op != "recurrent":
            return layer.note
        batch = "takes longer" if layer.inputs[0] in self.batches else "is not possible here"
        name, inputs = layer.options["name"].partition("_")[0], [self.tensors[name] for name in layer.inputs]
        if sizes_of(layer, inputs) is None:
            return f"{name} with projections has no rule for its units; cutting its batch {batch}"
        return f"cutting the units of {name} takes longer; cutting its batch {batch}"

    def reach(self, tensor: Tensor, state: State, need: TensorPlacement) -> tuple[State, list[Move]] | None:
        """Returns the states of a tensor once it is redistributed to `need`, and the moves for that."""
        if state is None:  # a parameter is placed as its first use needs it
            start = REPLICATED if need == COPIED else need
            if start == PARTIAL:
                return None
            state = frozenset([start])
        if need in state:
            return state, []
        if need == PARTIAL:
            return None
        placements = {placement.state: placement for placement in sorted(state)}
        moves: list[Move] = []
        if need.state == "sharded" and "partial" in placements:
            moves = [self._move(tensor, "reduce_scatter", placements["partial"], need)]
        elif need.state == "sharded":
            source = placements.get("replicated")
            if source is None:
                moves = self._gather(tensor, placements["sharded"], REPLICATED)
            moves.append(self._move(tensor, "slice", REPLICATED, need))
        elif "sharded" in placements:
            moves = self._gather(tensor, placements["sharded"], need)
        else:
            if "replicated" not in placements:
                moves = [self._move(tensor, "reduce", PARTIAL, REPLICATED)]
            if need == COPIED:
                moves.append(self._move(tensor, "copy", REPLICATED, COPIED))
        return state | {move.after for move in moves}, moves

    def _gather(self, tensor: Tensor, source: TensorPlacement, need: TensorPlacement) -> list[Move]:
        name: MoveName = "gather_for_ranks" if need == COPIED else "gather_for_all"
        return [self._move(tensor, name, source, need)]

    def _move(self, tensor: Tensor, name: MoveName, before: TensorPlacement, after: TensorPlacement) -> Move:
        key = (tensor.name, name, before, after)
        if key not in self._moves:
            self._moves[key] = self._new_move(tensor, name, before, after)
        return self._moves[key]

    def _new_move(self, tensor: Tensor, name: MoveName, before: TensorPlacement, after: TensorPlacement) -> Move:
        once = tensor.size_bytes * (self.size - 1)
        forward = {"reduce": 2, "reduce_scatter": 1, "gather_for_ranks": 1, "gather_for_all": 1}.get(name, 0)
        backward = {"copy": 2, "reduce_scatter": 1, "gather_for_ranks": 1, "slice": 1}.get(name, 0)
        back = backward * once if tensor.has_grad else 0
        return Move.model_construct(
            tensor=tensor.name, name=name, before=before, after=after, forward_bytes=forward * once, backward_bytes=back
        )

    def _price(self, move: Move) -> float:
        sent = (move.forward_bytes + move.backward_bytes) / self.size
        messages = (move.forward_bytes > 0) + (move.backward_bytes > 0)
        return sent * self.rates.flops_per_byte + messages * self.rates.flops_per_message

    def _work(self, context: LayerContext, option: LayerOption) -> float:
        layer = context.layer
        if option.is_whole and layer.op in WEIGHTED and len(context.inputs) > 1:
            return FORBIDDEN
        is_repeated = option.is_whole or option.mode == "summand"
        key = (layer.name, is_repeated)
        if key not in self._work_of:
            flops = work_of(layer)
            self._work_of[key] = flops * self.slowdown if is_repeated else flops
        return self._work_of[key]


def _changed_names(layer: Layer) -> Sequence[str]:
    """Returns the buffers that an operation changes in place: they cannot be redistributed for it."""
    return layer.inputs[:1] if layer.op == "assign" else [layer.inputs[i] for i in layer.options.get("statistics", ())]


def _width(context: LayerContext) -> int:
    """Returns the bytes of one element of a layer's input."""
    return context.inputs[0].size_bytes // max(1, context.inputs[0].numel) if context.inputs else 0


def _summed_width(context: LayerContext) -> int:
    """Returns the bytes of one element of what a layer sums over ranks: at least those of float32."""
    return max(4, _width(context)) if context.inputs else 0
