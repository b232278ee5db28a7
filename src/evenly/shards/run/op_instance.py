"""One operation of a cut network: its node, layer and mode, and the indices of each cut that this rank holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from evenly.comm import Redistribute, ShardGroup, count_of
from evenly.graph import name_of, path_of
from evenly.shards.run.dropout import DropoutStream
from evenly.shards.run.ops import Dependence, linked_zeros
from evenly.spec.graph import Layer
from evenly.spec.layout import Choice, Layout, Move, Segments, TensorPlacement, deal, ranges

REFUSES_EMPTY = {"conv", "spatial", "batch_norm", "instance_norm", "group_norm", "prelu", "attention", "embedding"}
REFUSES_EMPTY |= {"pixel_shuffle", "along", "repeat"}  # operations of torch that refuse an empty dim
RUNS_ON_EMPTY = {"moments", "vocabulary", "rows"}  # modes whose local op takes empty parts; some call a collective

# The value of a node of the traced program: a tensor, a number, a size, a dtype, None, or a tuple, list or dict of
# these. Which of them depends on the operation, so it cannot be checked statically.
NodeValue = Any
ValueKey = tuple[str, TensorPlacement | None]  # a tensor in one of its placements; None: not a tensor
NodeArguments = tuple[tuple[NodeValue, ...], dict[str, NodeValue]]  # positional ones, and those by name


def redistribution(shard_group: ShardGroup, layout: Layout, move: Move) -> Callable[["ForwardContext"], Redistribute]:
    """Returns a function that gives the redistribution of a move; of a dim that is no batch it is always the same."""
    cut = move.before if move.before.state == "sharded" else move.after
    if cut.state == "sharded" and layout.cuts[cut.cut].rows:
        return lambda context: Redistribute(shard_group, move.name, cut.dim, context.segments(cut))
    segments = layout.cuts[cut.cut].segments if cut.state == "sharded" else ()
    redistribute = Redistribute(shard_group, move.name, cut.dim, segments)
    return lambda context: redistribute


class ForwardContext:
    """One forward pass: the batch, the values computed so far, and the indices of each cut that this rank holds."""

    def __init__(
        self, shard_group: ShardGroup, dropout_stream: DropoutStream, layout: Layout, arguments: Mapping[str, object]
    ) -> None:
        self.shard_group = shard_group
        self.dropout_stream = dropout_stream
        self.layout = layout
        self.arguments = arguments
        self.values: dict[ValueKey, NodeValue] = {}
        first = next((a for a in arguments.values() if isinstance(a, torch.Tensor) and a.ndim), None)
        self.samples = first.shape[0] if first is not None else 0

    def segments(self, placement: TensorPlacement) -> tuple[Segments, ...]:
        """Returns the index ranges of each rank for this batch."""
        cut = self.layout.cuts[placement.cut]
        if not cut.rows:
            return cut.segments
        shares = [self.layout.shares[rank] for rank in self.layout.members]
        dealt = ranges(deal(self.samples, shares))
        return tuple(tuple((a * cut.rows, b * cut.rows) for a, b in part) for part in dealt)

    def own_segments(self, placement: TensorPlacement) -> Segments:
        """Returns the index ranges of this rank for this batch."""
        return self.segments(placement)[self.shard_group.rank]

    def count(self, placement: TensorPlacement) -> int:
        """Returns the number of indices that this rank holds."""
        return count_of(self.own_segments(placement))

    def size(self, placement: TensorPlacement) -> int:
        """Returns the full size of the dim that is cut."""
        cut = self.layout.cuts[placement.cut]
        return self.samples * cut.rows if cut.rows else cut.size

    def full_shape(self, x: torch.Tensor, placement: TensorPlacement | None) -> tuple[int, ...]:
        """Returns the shape of the full tensor of which x is this rank's part."""
        shape = list(x.shape)
        if placement is not None and placement.state == "sharded":
            shape[placement.dim] = self.size(placement)
        return tuple(shape)

    def full_meta(self, x: object, placement: TensorPlacement | None) -> object:
        """Returns a meta tensor of the full shape; values that are not tensors are returned unchanged."""
        if not isinstance(x, torch.Tensor):
            return x
        dtype = torch.float32 if x.is_floating_point() else x.dtype  # types may differ under autocast
        return torch.empty(self.full_shape(x, placement), dtype=dtype, device="meta")


def switch(
    args: tuple[NodeValue, ...],
    kwargs: Mapping[str, NodeValue],
    switches: Mapping[str, tuple[object, object]],
    owner: nn.Module,
) -> NodeArguments:
    """Returns the arguments, with those that depend on the mode set for the owner's mode (training or evaluation)."""
    chosen = {key: pair[not owner.training] for key, pair in switches.items()}
    args = tuple(chosen.get(str(i), value) for i, value in enumerate(args))
    return args, {key: chosen.get(key, value) for key, value in kwargs.items()}


@dataclass
class OpInstance:
    """One operation of the network on this rank."""

    node: fx.Node
    layer: Layer
    choice: Choice
    number: int
    model: nn.Module  # this rank's part
    original: nn.Module
    switches: Mapping[str, tuple[object, object]]  # argument -> its values in training and in evaluation

    @cached_property
    def needs(self) -> dict[str, TensorPlacement]:
        """The placement in which each input tensor is read."""
        return dict(zip(self.layer.inputs, self.choice.needs, strict=True))

    @cached_property
    def owner(self) -> nn.Module:
        """The module whose forward contains the operation."""
        path = path_of(self.node)
        return self.model.get_submodule(path) if path else self.model

    @cached_property
    def run(self) -> Callable[..., NodeValue]:
        """The operation itself."""
        return _callable(self.node, self.model)

    def reader(self, placements: Mapping[str, TensorPlacement]) -> Callable[[ForwardContext], NodeArguments]:
        """Returns a function that reads the arguments: tensors in these placements, switches by the module's mode."""
        values = (*self.node.args, *self.node.kwargs.values())
        if self.switches or any(isinstance(value, tuple | list | dict | slice) for value in values):
            return lambda context: self._switched(lambda n: context.values[n.name, placements.get(n.name)])

        def keyed(value: object) -> tuple[ValueKey | None, object]:
            return ((value.name, placements.get(value.name)) if isinstance(value, fx.Node) else None), value

        positional = [keyed(value) for value in self.node.args]
        named = [(name, *keyed(value)) for name, value in self.node.kwargs.items()]

        def read(context: ForwardContext) -> NodeArguments:
            values = context.values
            args = tuple([constant if key is None else values[key] for key, constant in positional])
            return args, {name: constant if key is None else values[key] for name, key, constant in named}

        return read

    @cached_property
    def arguments(self) -> Callable[[ForwardContext], NodeArguments]:
        """The function that reads the arguments in the needed placements."""
        return self.reader(self.needs)

    def _switched(self, fetch: Callable[[fx.Node], NodeValue]) -> NodeArguments:
        """Returns the arguments that `fetch` returns, with the switches set by the module's mode."""
        args, kwargs = fx.map_arg((self.node.args, dict(self.node.kwargs)), fetch)
        return switch(args, kwargs, self.switches, self.owner) if self.switches else (args, kwargs)

    def is_idle(self, context: ForwardContext) -> bool:
        """Whether this rank holds no indices of the operation's cut tensors, and torch would refuse empty ones."""
        if self.layer.op not in REFUSES_EMPTY or self.choice.mode in RUNS_ON_EMPTY:
            return False
        cut = [placement for placement in (*self.choice.needs, *self.choice.gives) if placement.state == "sharded"]
        return any(context.count(placement) == 0 for placement in cut)

    def idle(
        self,
        context: ForwardContext,
        inputs: list[torch.Tensor] | None = None,
        reads: Mapping[str, TensorPlacement] | None = None,
    ) -> torch.Tensor:
        """Returns the output on a rank that holds no indices: an empty part of a cut tensor, zeros as a summand."""
        shape = list(self.full_output(context, reads).shape)
        (output_placement,) = self.choice.gives
        if output_placement.state == "sharded":
            shape[output_placement.dim] = context.count(output_placement)
        if inputs is None:
            names = [n.name for n in self.node.all_input_nodes if n.name in self.needs]
            inputs = [context.values[name, self.needs[name]] for name in names]
        if self.node.op == "call_module":
            module = self.model.get_submodule(str(self.node.target))
            inputs += list(module.parameters())
            counter = getattr(module, "num_batches_tracked", None)
            if self.layer.op == "batch_norm" and module.training and isinstance(counter, torch.Tensor):
                counter.add_(1)
        floats = [x for x in inputs if x.is_floating_point()]
        return linked_zeros(shape, *floats, dependence=self._dependence())

    def _dependence(self) -> Dependence:
        """Returns what the gradients of this operation depend on."""
        if self.layer.op in ("conv", "linear"):
            return "product"
        name = name_of(self.node)
        pads = name.startswith("ConstantPad") or (name == "pad" and not self.node.kwargs and len(self.node.args) < 3)
        is_linear = self.layer.op in ("pixel_shuffle", "repeat", "embedding") or bool(self.layer.options.get("linear"))
        return "gradient" if is_linear or pads or "psampl" in name or name == "interpolate" else "all"

    def full_output(self, context: ForwardContext, reads: Mapping[str, TensorPlacement] | None = None) -> NodeValue:
        """Returns the full output of the operation as a meta tensor."""
        states = self.needs if reads is None else reads
        args, kwargs = self._switched(
            lambda n: context.full_meta(context.values[n.name, states.get(n.name)], states.get(n.name))
        )
        if self.layer.op in ("batch_norm", "instance_norm"):
            return args[0]
        return _callable(self.node, self.original)(*args, **kwargs)


def _callable(node: fx.Node, model: nn.Module) -> Callable[..., NodeValue]:
    if node.op == "call_module":
        return model.get_submodule(str(node.target))
    if node.op == "call_method":
        name = str(node.target)
        return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)
    if node.op == "output":
        return lambda value: value
    return node.target  # type: ignore[return-value]  # of a call_function it is a function
