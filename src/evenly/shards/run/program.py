"""Compiles a traced network and its layout into the list of steps that one rank runs."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import fx, nn

from evenly._torch import pytree
from evenly._torch.autograd import in_backward
from evenly._torch.modules import tensor_reader
from evenly._torch.tracing import is_constant
from evenly.comm import ShardGroup, copy_together
from evenly.errors import SpecError
from evenly.graph import Traced, path_of
from evenly.shards.run.cutting import parameter_placements
from evenly.shards.run.dropout import RANDOM_OPS, DropoutStream
from evenly.shards.run.fusion import biases, input_moves
from evenly.shards.run.local_ops import local_layer_of, local_op_of
from evenly.shards.run.op_instance import ForwardContext, NodeValue, OpInstance, ValueKey, redistribution
from evenly.shards.run.overlapped_layers import to_autocast_dtype
from evenly.spec.graph import Layer
from evenly.spec.layout import REPLICATED, Choice, Layout, Move, TensorPlacement


@dataclass
class ProgramStep:
    """One operation or move: the values it reads, and those to free after it."""

    name: str
    run: Callable[[ForwardContext], None]
    reads: list[ValueKey]
    drops: list[ValueKey] = field(default_factory=list)


class Program:
    """The steps of one rank, in order; `listener` is called with every tensor that is computed."""

    def __init__(
        self, traced: Traced, layout: Layout, model: nn.Module, shard_group: ShardGroup, dropout_stream: DropoutStream
    ) -> None:
        self.traced = traced  # without data
        self.layout = layout
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
        self._biases, self._input_moves = biases(traced, layout), input_moves(traced, layout)
        self._layer_of_bias = {bias: layer for layer, bias in self._biases.items()}
        self._nodes = {node.name: node for node in traced.program.graph.nodes}
        self._training_owners = {name: model.get_submodule(path_of(self._nodes[name])) for name in traced.training_only}
        self._has_dropout = any(choice.op in RANDOM_OPS for choice in layout.choices)
        self._parameter_placements = dict(parameter_placements(traced, layout))
        self._copied = [
            move
            for move in layout.moves
            if move.name == "copy" and move.tensor not in traced.training_only and self._is_parameter(move.tensor)
        ]
        self._available: set[ValueKey] = set()
        self.listener: Callable[[str, TensorPlacement, object], None] | None = None
        self.steps: list[ProgramStep] = []
        for number, node in enumerate(traced.program.graph.nodes):
            if node.name in self._layers:
                self._add(node, self._layers[node.name], number)
        last = {key: step for step in self.steps for key in step.reads}
        for key, step in last.items():
            step.drops.append(key)

    def run(self, arguments: Mapping[str, object]) -> object:
        """Runs this rank's steps and returns the output of the network's forward."""
        if self._has_dropout and self._model.training and in_backward():
            raise SpecError(
                "forward was called during backward, as torch.utils.checkpoint does, but the network has dropout, "
                "and its masks would differ. Call the sharded network without checkpoint."
            )
        context = ForwardContext(self._shard_group, self._dropout_stream, self.layout, arguments)
        for step in self.steps:
            step.run(context)
            for key in step.drops:
                del context.values[key]
        if self._model.training:
            self._dropout_stream.passes += 1
        return self._restore_structure(context.values["output", None])

    def _restore_structure(self, result: object) -> object:
        """Returns the outputs in the tuples, lists and dicts of the network's forward."""
        structure = self.traced.output_spec
        if structure is None or (structure.is_leaf() and isinstance(result, torch.Tensor)):
            return result
        leaves = pytree.tree_leaves(result)
        return pytree.tree_unflatten(leaves, structure) if structure.num_leaves == len(leaves) else result

    def _add(self, node: fx.Node, layer: Layer, number: int) -> None:
        if node.op == "get_attr":
            return  # fetched by the steps that read it
        if node.op == "placeholder":
            self._input(node)
        elif layer.op in ("number", "constant"):
            self._number(node, layer, number)
        elif node.name in self._layer_of_bias:
            self._alias(node, layer)
        elif layer.op in ("conv", "linear"):
            self._layer(node, layer, number)
        else:
            self._operation(node, layer, number)

    def _input(self, node: fx.Node) -> None:
        key: ValueKey = (node.name, REPLICATED)
        name = str(node.target)

        def run(context: ForwardContext) -> None:
            context.values[key] = context.arguments.get(name)

        self._step(node.name, [], [key], run)

    def _op_instance(self, node: fx.Node, layer: Layer, choice: Choice, number: int) -> OpInstance:
        switches = self.traced.switches.get(node.name, {})
        return OpInstance(node, layer, choice, number, self._model, self.traced.program, switches)

    def _operation(self, node: fx.Node, layer: Layer, number: int) -> None:
        op_instance = self._op_instance(node, layer, self._choices[node.name], number)
        for name, need in op_instance.needs.items():
            self._ensure(name, need)
        outputs = [
            (tensor.name, placement) for tensor, placement in zip(layer.outputs, op_instance.choice.gives, strict=True)
        ]
        single: ValueKey | None = (
            (node.name, None) if not outputs else outputs[0] if outputs[0][0] == node.name else None
        )
        local_op = local_op_of(op_instance)

        def run(context: ForwardContext) -> None:
            result: NodeValue
            if op_instance.is_idle(context):
                result = op_instance.idle(context)
            else:
                args, kwargs = op_instance.arguments(context)
                result = local_op(context, *args, **kwargs)
            if single is not None:
                context.values[single] = result
            elif len(result) == len(outputs):
                context.values.update(zip(outputs, result, strict=True))
            else:
                context.values.update(self._used_outputs(node, outputs, result))
            if self.listener is not None:
                self._notify_listener(context, list(outputs))

        self._step(node.name, self._reads(node, op_instance.needs), [single] if single else list(outputs), run)

    def _used_outputs(
        self, node: fx.Node, outputs: Sequence[ValueKey], results: Sequence[object]
    ) -> dict[ValueKey, object]:
        """Returns the used tensors of a tuple whose length differs from the one for the example."""
        used = [index for index, key in enumerate(outputs) if any(key in step.reads for step in self.steps)]
        if node.meta.get("has_fixed_length") or any(index >= len(results) for index in used):
            raise SpecError(
                f"{node.name!r} gave {len(outputs)} tensors for the example and gives {len(results)} for this batch, "
                "and forward uses them one by one. Give batches of the example's size, or move it into a module of its "
                "own."
            )
        return {outputs[index]: results[index] for index in used}

    def _alias(self, node: fx.Node, layer: Layer) -> None:
        """Adds a step for a bias that its layer already adds: the value is renamed."""
        choice = self._choices[node.name]
        before, after = (layer.inputs[0], choice.needs[0]), (node.name, choice.gives[0])

        def run(context: ForwardContext) -> None:
            context.values[after] = context.values[before]
            self._notify_listener(context, [after])

        self._step(node.name, [before], [after], run)

    def _layer(self, node: fx.Node, layer: Layer, number: int) -> None:
        """Adds a convolution or linear layer, fused with its bias and the move of its input where possible."""
        op_instance = self._op_instance(node, layer, self._choices[node.name], number)
        input_move = self._input_moves.get(node.name)
        bias_layer = self._biases.get(node.name)
        reads = dict(op_instance.needs)
        if input_move is not None:
            reads[input_move.tensor] = input_move.before
        bias: ValueKey | None = None
        if bias_layer is not None:
            bias = (self._layers[bias_layer].inputs[1], self._choices[bias_layer].needs[1])
        for name, need in (*reads.items(), *([bias] if bias else [])):
            if need is not None:
                self._ensure(name, need)
        out: ValueKey = (node.name, op_instance.choice.gives[0])
        redistribute = None if input_move is None else redistribution(self._shard_group, self.layout, input_move)
        local_layer = local_layer_of(op_instance, reads, redistribute)

        def run(context: ForwardContext) -> None:
            bias_value = context.values[bias] if bias is not None else None
            context.values[out] = local_layer(context, bias_value)
            if bias_layer is None and self.listener is not None:
                self._notify_listener(context, [out])

        self._step(node.name, [*self._reads(node, reads), *([bias] if bias else [])], [out], run)

    def _notify_listener(self, context: ForwardContext, keys: list[ValueKey]) -> None:
        if self.listener is not None:
            for name, placement in keys:
                if placement is not None and (name, placement) in context.values:
                    self.listener(name, placement, context.values[name, placement])

    def _reads(self, node: fx.Node, needs: Mapping[str, TensorPlacement]) -> list[ValueKey]:
        return [self._key(n.name, needs) for n in node.all_input_nodes]

    def _key(self, name: str, needs: Mapping[str, TensorPlacement]) -> ValueKey:
        return name, needs.get(name)

    def _number(self, node: fx.Node, layer: Layer, number: int) -> None:
        """Adds a step that computes a number, such as a size, from full shapes."""
        needs = tuple(self._available_placement(name) for name in layer.inputs)
        choice = Choice(layer=layer.name, mode="source", needs=needs)
        op_instance = self._op_instance(node, layer, choice, number)
        for name, need in op_instance.needs.items():
            self._ensure(name, need)
        key: ValueKey = (node.name, REPLICATED if layer.outputs else None)

        def run(context: ForwardContext) -> None:
            args, kwargs = op_instance.arguments(context)
            is_direct = layer.op == "constant" or (node.target is getattr and args[1] in ("device", "dtype"))
            context.values[key] = op_instance.run(*args, **kwargs) if is_direct else op_instance.full_output(context)

        self._step(node.name, self._reads(node, op_instance.needs), [key], run)

    def _available_placement(self, name: str) -> TensorPlacement:
        """Returns a placement in which a tensor is available at this point."""
        available = sorted(
            placement for tensor, placement in self._available if tensor == name and placement is not None
        )
        return available[0] if available else self._parameter_placements.get(self._paths.get(name, ""), REPLICATED)

    def _ensure(self, name: str, need: TensorPlacement) -> None:
        """Adds the steps that bring a tensor into the placement `need`, unless it is available there."""
        key: ValueKey = (name, need)
        if key in self._available:
            return
        move = self._moves.get((name, need))
        if move is not None and move in self._copied:
            self._copy_parameters()
        elif move is not None:
            self._ensure(name, move.before)
            self._step(f"{name}:{move.name}", [(name, move.before)], [key], self._move_runner(move))
        elif name in self._paths:
            fetch = self._fetcher(name)

            def run(context: ForwardContext) -> None:
                context.values[key] = fetch()

            self._step(name, [], [key], run)

    def _is_parameter(self, name: str) -> bool:
        layer = self._layers.get(name)
        return layer is not None and layer.op == "parameter"

    def _copy_parameters(self) -> None:
        """Adds the step that copies all parameters of which every rank needs the whole."""
        for move in self._copied:
            self._ensure(move.tensor, move.before)
        before: list[ValueKey] = [(move.tensor, move.before) for move in self._copied]
        after: list[ValueKey] = [(move.tensor, move.after) for move in self._copied]

        def run(context: ForwardContext) -> None:
            parameters = [context.values[key] for key in before]
            context.values.update(zip(after, parameters, strict=True))
            learning = [index for index, parameter in enumerate(parameters) if parameter.requires_grad]
            if learning and torch.is_grad_enabled():
                copies = copy_together([parameters[index] for index in learning], self._shard_group)
                context.values.update(zip([after[index] for index in learning], copies, strict=True))

        self._step("parameters:copy", before, after, run)

    def _fetcher(self, name: str) -> Callable[[], object]:
        """Returns a function that returns the parameter, buffer or constant `name`."""
        path = self._paths[name]
        if self._layers[name].op == "constant":
            return partial(operator.attrgetter(path), self.traced.program)
        parent, _, attribute = path.rpartition(".")
        reader = tensor_reader(self._model.get_submodule(parent), attribute)
        return partial(operator.attrgetter(path), self._model) if reader is None else reader

    def _move_runner(self, move: Move) -> Callable[[ForwardContext], None]:
        before, after = (move.tensor, move.before), (move.tensor, move.after)
        redistribute = redistribution(self._shard_group, self.layout, move)
        is_state = move.tensor in self._paths

        def run(context: ForwardContext) -> None:
            x = context.values[before] if is_state else to_autocast_dtype(context.values[before])
            context.values[after] = redistribute(context)(x)

        return run

    def _step(
        self, name: str, reads: list[ValueKey], writes: list[ValueKey], run: Callable[[ForwardContext], None]
    ) -> None:
        owner = self._training_owners.get(name.partition(":")[0])
        if owner is not None:
            run = _in_training(run, owner, writes)
        self._available.update(writes)
        self.steps.append(ProgramStep(name, run, reads))


def _in_training(
    run: Callable[[ForwardContext], None], owner: nn.Module, writes: list[ValueKey]
) -> Callable[[ForwardContext], None]:
    """Returns a step that gives None where the module in whose forward it was traced is in evaluation."""

    def run_in_training(context: ForwardContext) -> None:
        if owner.training:
            run(context)
        else:
            context.values.update(dict.fromkeys(writes))

    return run_in_training
