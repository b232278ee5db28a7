"""One operation in its place: the node, its layer and mode, and what of each cut this rank holds in this batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from evenly.comm import ShardGroup, count_of
from evenly.graph import path_of
from evenly.shards.run.dropout import DropoutStream
from evenly.shards.run.ops import hollow
from evenly.spec.graph import Layer
from evenly.spec.layout import Choice, Layout, Segments, TensorPlacement, deal, ranges

NEEDS_SOMETHING = {"conv", "spatial", "batch_norm", "instance_norm", "group_norm", "prelu", "attention", "embedding"}
NEEDS_SOMETHING |= {"pixel_shuffle", "along", "repeat"}  # operations of torch that refuse an empty dim
TOGETHER = {"moments", "vocabulary", "rows"}  # modes in which all ranks meet inside the operation


class ForwardContext:
    """One forward pass: the batch, the values so far, and what of each cut this rank holds."""

    def __init__(
        self, shard_group: ShardGroup, dropout_stream: DropoutStream, layout: Layout, arguments: Mapping[str, Any]
    ) -> None:
        self.shard_group = shard_group
        self.dropout_stream = dropout_stream
        self.layout = layout
        self.arguments = arguments
        self.values: dict[tuple[str, TensorPlacement | None], Any] = {}
        first = next((a for a in arguments.values() if isinstance(a, torch.Tensor) and a.ndim), None)
        self.samples = first.shape[0] if first is not None else 0

    def segments(self, record: TensorPlacement) -> tuple[Segments, ...]:
        """Returns the ranges of each rank, for this batch."""
        cut = self.layout.cuts[record.cut]
        if not cut.rows:
            return cut.segments
        shares = [self.layout.shares[rank] for rank in self.layout.members]
        dealt = ranges(deal(self.samples, shares))
        return tuple(tuple((a * cut.rows, b * cut.rows) for a, b in part) for part in dealt)

    def own(self, record: TensorPlacement) -> Segments:
        """Returns the ranges of this rank."""
        return self.segments(record)[self.shard_group.rank]

    def count(self, record: TensorPlacement) -> int:
        """Returns how many indices this rank holds."""
        return count_of(self.own(record))

    def size(self, record: TensorPlacement) -> int:
        """Returns the full size of the dim that is cut."""
        cut = self.layout.cuts[record.cut]
        return self.samples * cut.rows if cut.rows else cut.size

    def full_shape(self, x: torch.Tensor, record: TensorPlacement | None) -> tuple[int, ...]:
        """Returns the shape of the full tensor of which x is this rank's part."""
        shape = list(x.shape)
        if record is not None and record.state == "sharded":
            shape[record.dim] = self.size(record)
        return tuple(shape)

    def unfilled(self, x: Any, record: TensorPlacement | None) -> Any:
        """Returns a tensor of the full shape without data; other values as they are."""
        if not isinstance(x, torch.Tensor):
            return x
        kind = torch.float32 if x.is_floating_point() else x.dtype  # types may differ under autocast
        return torch.empty(self.full_shape(x, record), dtype=kind, device="meta")


def switch(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], switches: Mapping[str, tuple[Any, Any]], owner: nn.Module
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments with those that training and evaluation set apart as the owner's mode has them."""
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
    switches: dict[str, tuple[Any, Any]]

    @cached_property
    def needs(self) -> dict[str, TensorPlacement]:
        """The state in which each tensor is read."""
        return dict(zip(self.layer.inputs, self.choice.needs, strict=True))

    @cached_property
    def owner(self) -> nn.Module:
        """The module in whose forward the operation stands."""
        path = path_of(self.node)
        return self.model.get_submodule(path) if path else self.model

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The operation itself."""
        return _callable(self.node, self.model)

    def arguments(self, now: ForwardContext) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments: tensors in the states needed, switches as the module's mode says."""
        return self.switched(lambda n: now.values[n.name, self.needs.get(n.name)])

    def switched(self, fetch: Callable[[fx.Node], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments as `fetch` gives them."""
        args, kwargs = fx.map_arg((self.node.args, dict(self.node.kwargs)), fetch)
        return switch(args, kwargs, self.switches, self.owner) if self.switches else (args, kwargs)

    def is_idle(self, now: ForwardContext) -> bool:
        """Whether this rank has no part in the operation."""
        if self.layer.op not in NEEDS_SOMETHING or self.choice.mode in TOGETHER:
            return False
        cut = [record for record in (*self.choice.needs, *self.choice.gives) if record.state == "sharded"]
        return any(now.count(record) == 0 for record in cut)

    def idle(
        self,
        now: ForwardContext,
        inputs: list[torch.Tensor] | None = None,
        reads: Mapping[str, TensorPlacement] | None = None,
    ) -> Any:
        """Returns what a rank without a part gives: nothing of a cut tensor, zeros as a summand."""
        shape = list(self.full_output(now, reads).shape)
        (given,) = self.choice.gives
        if given.state == "sharded":
            shape[given.dim] = now.count(given)
        if inputs is None:
            read = [n.name for n in self.node.all_input_nodes if n.name in self.needs]
            inputs = [now.values[name, self.needs[name]] for name in read]
        if self.node.op == "call_module":
            module = self.model.get_submodule(str(self.node.target))
            inputs += list(module.parameters())
            counter = getattr(module, "num_batches_tracked", None)
            if self.layer.op == "batch_norm" and module.training and isinstance(counter, torch.Tensor):
                counter.add_(1)
        floats = [x for x in inputs if x.is_floating_point()]
        return hollow(shape, *floats)

    def full_output(self, now: ForwardContext, reads: Mapping[str, TensorPlacement] | None = None) -> Any:
        """Returns what the whole operation would give, without data."""
        states = self.needs if reads is None else reads
        args, kwargs = self.switched(lambda n: now.unfilled(now.values[n.name, states.get(n.name)], states.get(n.name)))
        if self.layer.op in ("batch_norm", "instance_norm"):
            return args[0]
        return _callable(self.node, self.original)(*args, **kwargs)


def _callable(node: fx.Node, model: nn.Module) -> Callable[..., Any]:
    if node.op == "call_module":
        return model.get_submodule(str(node.target))
    if node.op == "call_method":
        name = str(node.target)
        return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)
    if node.op == "output":
        return lambda value: value
    return node.target  # type: ignore[return-value]  # of a call_function it is a function
