"""A traced network and its layout as the list of steps that one rank runs."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from evenly._torch import pytree
from evenly._torch.autograd import in_backward
from evenly._torch.tracing import is_constant
from evenly.comm import Redistribute, ShardGroup
from evenly.errors import SpecError
from evenly.graph import Traced
from evenly.shards.run.cutting import homes
from evenly.shards.run.dropout import DropoutStream
from evenly.shards.run.fusion import biases, entries
from evenly.shards.run.local_ops import act_of, layer_of
from evenly.shards.run.op_instance import ForwardContext, OpInstance
from evenly.shards.run.overlapped_layers import lowered
from evenly.spec.graph import Layer
from evenly.spec.layout import REPLICATED, Choice, Layout, Move, TensorPlacement

Key = tuple[str, TensorPlacement | None]  # a tensor in one of its states; None: not a tensor


@dataclass
class ProgramStep:
    """One operation or move: what it reads, and which values nobody needs afterwards."""

    name: str
    run: Callable[[ForwardContext], None]
    reads: list[Key]
    drops: list[Key] = field(default_factory=list)


class Program:
    """The steps of one rank."""

    def __init__(
        self, traced: Traced, layout: Layout, model: nn.Module, shard_group: ShardGroup, dropout_stream: DropoutStream
    ) -> None:
        self.traced = traced  # without data
        self._layout = layout
        self._model = model
        self._shard_group = shard_group
        self._dropout_stream = dropout_stream
        self._layers = {layer.name: layer for layer in traced.graph.layers}
        self._choices = {choice.layer: choice for choice in layout.choices}
        self._moves = {(move.tensor, move.after): move for move in layout.moves}
        self._paths = {
            layer.name: layer.where
            for layer in traced.graph.layers
            if layer.op in ("parameter", "buffer") or is_constant(layer.where)
        }
        self._biases, self._entries = biases(traced, layout), entries(traced, layout)
        self._bias_done = {bias: layer for layer, bias in self._biases.items()}
        self._nodes = {node.name: node for node in traced.program.graph.nodes}
        self._draws = any(choice.op in ("dropout", "attention") for choice in layout.choices)
        self._homes = dict(homes(traced, layout))
        self._known: set[Key] = set()
        self.listener: Callable[[str, TensorPlacement, Any], None] | None = None  # told every tensor as it is made
        self.steps: list[ProgramStep] = []
        for number, node in enumerate(traced.program.graph.nodes):
            if node.name in self._layers:
                self._add(node, self._layers[node.name], number)
        last = {key: step for step in self.steps for key in step.reads}
        for key, step in last.items():
            step.drops.append(key)

    def run(self, arguments: Mapping[str, Any]) -> Any:
        """Returns what the network's forward returns; this rank does its part of the work."""
        if self._draws and self._model.training and in_backward():
            raise SpecError(
                "forward was called during backward, as torch.utils.checkpoint does, but the network has dropout, "
                "whose masks would not be drawn again. Call the sharded network without checkpoint."
            )
        now = ForwardContext(self._shard_group, self._dropout_stream, self._layout, arguments)
        for step in self.steps:
            step.run(now)
            for key in step.drops:
                del now.values[key]
        if self._model.training:
            self._dropout_stream.passes += 1
        return self._formed(now.values["output", None])

    def _formed(self, result: Any) -> Any:
        """Returns what forward returned in the tuples, lists and dicts that it made."""
        form = self.traced.form
        leaves = pytree.tree_leaves(result)
        return pytree.tree_unflatten(leaves, form) if form is not None and form.num_leaves == len(leaves) else result

    def _add(self, node: fx.Node, layer: Layer, number: int) -> None:
        if node.op == "get_attr":
            return  # fetched where it is needed
        if node.op == "placeholder":
            self._input(node)
        elif layer.op in ("number", "constant"):
            self._number(node, layer, number)
        elif node.name in self._bias_done:
            self._alias(node, layer)
        elif layer.op in ("conv", "linear"):
            self._layer(node, layer, number)
        else:
            self._operation(node, layer, number)

    def _input(self, node: fx.Node) -> None:
        key: Key = (node.name, REPLICATED)
        name = str(node.target)

        def run(now: ForwardContext) -> None:
            now.values[key] = now.arguments.get(name)

        self._step(node.name, [], [key], run)

    def _site(self, node: fx.Node, layer: Layer, choice: Choice, number: int) -> OpInstance:
        switches = self.traced.switches.get(node.name, {})
        return OpInstance(node, layer, choice, number, self._model, self.traced.program, switches)

    def _operation(self, node: fx.Node, layer: Layer, number: int) -> None:
        op_instance = self._site(node, layer, self._choices[node.name], number)
        for name, need in op_instance.needs.items():
            self._ensure(name, need)
        outputs = [
            (tensor.name, record) for tensor, record in zip(layer.outputs, op_instance.choice.gives, strict=True)
        ]
        single: Key | None = (node.name, None) if not outputs else outputs[0] if outputs[0][0] == node.name else None
        act = act_of(op_instance)

        def run(now: ForwardContext) -> None:
            if op_instance.is_idle(now):
                made = op_instance.idle(now)
            else:
                args, kwargs = op_instance.arguments(now)
                made = act(now, *args, **kwargs)
            if single is not None:
                now.values[single] = made
            elif len(made) == len(outputs):
                now.values.update(zip(outputs, made, strict=True))
            else:
                now.values.update(self._some(node, outputs, made))
            self._tell(now, list(outputs))

        self._step(node.name, self._reads(node, op_instance.needs), [single] if single else list(outputs), run)

    def _some(self, node: fx.Node, outputs: Sequence[Key], made: Sequence[Any]) -> dict[Key, Any]:
        """Returns the tensors of a tuple that is of another length than for the example, where only some are used."""
        used = [place for place, key in enumerate(outputs) if any(key in step.reads for step in self.steps)]
        if node.meta.get("has_fixed_length") or any(place >= len(made) for place in used):
            raise SpecError(
                f"{node.name!r} gave {len(outputs)} tensors for the example and gives {len(made)} for this batch, and "
                "forward uses them one by one. Give batches of the example's size, or move it into a module of its own."
            )
        return {outputs[place]: made[place] for place in used}

    def _alias(self, node: fx.Node, layer: Layer) -> None:
        """The bias was added by the layer itself."""
        choice = self._choices[node.name]
        before, after = (layer.inputs[0], choice.needs[0]), (node.name, choice.gives[0])

        def run(now: ForwardContext) -> None:
            now.values[after] = now.values[before]
            self._tell(now, [after])

        self._step(node.name, [before], [after], run)

    def _layer(self, node: fx.Node, layer: Layer, number: int) -> None:
        """A convolution or linear layer, with its bias and the move of its input where these belong to it alone."""
        op_instance = self._site(node, layer, self._choices[node.name], number)
        entry = self._entries.get(node.name)
        adder = self._biases.get(node.name)
        reads = dict(op_instance.needs)
        if entry is not None:
            reads[entry.tensor] = entry.before
        bias: Key | None = None
        if adder is not None:
            bias = (self._layers[adder].inputs[1], self._choices[adder].needs[1])
        for name, need in (*reads.items(), *([bias] if bias else [])):
            if need is not None:
                self._ensure(name, need)
        out: Key = (node.name, op_instance.choice.gives[0])
        act = layer_of(op_instance, entry, self._shard_group)

        def run(now: ForwardContext) -> None:
            added = now.values[bias] if bias is not None else None
            now.values[out] = act(now, reads, added)
            if adder is None:
                self._tell(now, [out])

        self._step(node.name, [*self._reads(node, reads), *([bias] if bias else [])], [out], run)

    def _tell(self, now: ForwardContext, made: list[Key]) -> None:
        if self.listener is not None:
            for name, record in made:
                if record is not None and (name, record) in now.values:
                    self.listener(name, record, now.values[name, record])

    def _reads(self, node: fx.Node, needs: Mapping[str, TensorPlacement]) -> list[Key]:
        return [self._key(n.name, needs) for n in node.all_input_nodes]

    def _key(self, name: str, needs: Mapping[str, TensorPlacement]) -> Key:
        return name, needs.get(name)

    def _number(self, node: fx.Node, layer: Layer, number: int) -> None:
        """Numbers are those of the full network: sizes are asked of tensors with full shapes."""
        needs = tuple(self._at_hand(name) for name in layer.inputs)
        choice = Choice(layer=layer.name, mode="source", needs=needs)
        op_instance = self._site(node, layer, choice, number)
        for name, need in op_instance.needs.items():
            self._ensure(name, need)
        key: Key = (node.name, REPLICATED if layer.outputs else None)

        def run(now: ForwardContext) -> None:
            args, kwargs = op_instance.arguments(now)
            plain = layer.op == "constant" or (node.target is getattr and args[1] in ("device", "dtype"))
            now.values[key] = op_instance.run(*args, **kwargs) if plain else op_instance.full_output(now)

        self._step(node.name, self._reads(node, op_instance.needs), [key], run)

    def _at_hand(self, name: str) -> TensorPlacement:
        """Returns a state in which a tensor is known already."""
        known = sorted(record for known, record in self._known if known == name and record is not None)
        return known[0] if known else self._homes.get(self._paths.get(name, ""), REPLICATED)

    def _ensure(self, name: str, need: TensorPlacement) -> None:
        """Adds the moves that bring a tensor into the state `need`."""
        key: Key = (name, need)
        if key in self._known:
            return
        move = self._moves.get((name, need))
        if move is not None:
            self._ensure(name, move.before)
            self._step(f"{name}:{move.name}", [(name, move.before)], [key], self._mover(move))
        elif name in self._paths:
            fetch = operator.attrgetter(self._paths[name])
            owner = self.traced.program if self._layers[name].op == "constant" else self._model

            def run(now: ForwardContext) -> None:
                now.values[key] = fetch(owner)

            self._step(name, [], [key], run)

    def _mover(self, move: Move) -> Callable[[ForwardContext], None]:
        before, after = (move.tensor, move.before), (move.tensor, move.after)
        cut = move.before if move.before.state == "sharded" else move.after

        is_state = move.tensor in self._paths

        def run(now: ForwardContext) -> None:
            x = now.values[before] if is_state else lowered(now.values[before])
            segments = now.segments(cut) if cut.state == "sharded" else ()
            now.values[after] = Redistribute(self._shard_group, move.name, cut.dim, segments)(x)

        return run

    def _step(self, name: str, reads: list[Key], writes: list[Key], run: Callable[[ForwardContext], None]) -> None:
        self._known.update(writes)
        self.steps.append(ProgramStep(name, run, reads))
