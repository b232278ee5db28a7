"""One layer with the states its tensors are in, and one way of computing it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from evenly.layouts.cuts import DimCuts
from evenly.layouts.preferred_units import PreferredUnits, parts_of
from evenly.spec.graph import Layer, Tensor
from evenly.spec.layout import COPIED, TensorPlacement

State = (
    frozenset[TensorPlacement] | None
)  # the states in which a tensor is at hand; None: a parameter nobody has used yet


@dataclass(frozen=True)
class LayerOption:
    """One way of computing a layer; `messages` and `sent` are collectives inside it and the elements they sum."""

    mode: str
    needs: tuple[TensorPlacement, ...]
    gives: tuple[TensorPlacement, ...]
    messages: int = 0
    sent: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether every rank computes everything."""
        return self.mode == "whole"


@dataclass(frozen=True)
class LayerContext:
    """One layer with its tensors and the states they are in."""

    layer: Layer
    inputs: tuple[Tensor, ...]
    states: tuple[State, ...]
    cuts: DimCuts
    wishes: PreferredUnits
    channels: dict[str, int]
    batches: Mapping[str, TensorPlacement]  # how tensors would be cut along the batch, where that is allowed
    shares: Mapping[str, tuple[float, ...]]  # of tensors whose layer has its own

    def sharded(self, index: int, dim: int, *, batch: bool = False) -> list[TensorPlacement]:
        """Returns the cuts along `dim` in which input `index` is at hand, and the one it could be brought to."""
        found = sorted(r for r in self.states[index] or () if r.state == "sharded" and r.dim == dim)
        if batch or any(self.cuts.table[r.cut].rows for r in found):
            return found
        canonical = self.own_cut(self.inputs[index], dim)
        return found if canonical in found else [*found, canonical]

    def cut_dims(self, index: int) -> list[TensorPlacement]:
        """Returns the cuts in which input `index` is at hand."""
        found = sorted(r for r in self.states[index] or () if r.state == "sharded")
        along = self.batches.get(self.inputs[index].name)
        whole = along is not None and not found and self.has("replicated", index)
        return [along] if whole and along is not None and self.layer.kind == "mixing" else found

    def own_cut(self, tensor: Tensor, dim: int) -> TensorPlacement:
        """Returns the cut in which a tensor is made if nothing else decides."""
        shares = self.shares.get(tensor.name)
        return TensorPlacement("sharded", dim, self.cuts.of_parts(parts_of(self.wishes, tensor, dim), shares))

    def spread(self, index: int) -> list[TensorPlacement]:
        """Returns the cuts along its channels to which a tensor that is a sum can be brought."""
        dim = self.channels.get(self.inputs[index].name)
        return [self.own_cut(self.inputs[index], dim)] if dim is not None and self.has("partial", index) else []

    def rows(self, record: TensorPlacement) -> int:
        """Returns the rows a sample of a cut along the batch; 0 for other cuts."""
        return self.cuts.table[record.cut].rows

    def has(self, state: str, index: int = 0) -> bool:
        """Whether input `index` is at hand in this state."""
        return any(r.state == state for r in self.states[index] or ())


def others(
    context: LayerContext, first: Sequence[TensorPlacement], record: TensorPlacement
) -> tuple[TensorPlacement, ...]:
    """Returns the states of all inputs: `first`, then `record` for each that is left."""
    return tuple(first) + (record,) * (len(context.layer.inputs) - len(first))


def bystander(context: LayerContext, touched: Sequence[int]) -> Iterator[LayerOption]:
    """The input is cut along a dim that the operation treats like a batch: parameters are copied."""
    for record in context.cut_dims(0):
        if record.dim not in touched:
            yield LayerOption("bystander", others(context, [record], COPIED), (record,) * len(context.layer.outputs))
