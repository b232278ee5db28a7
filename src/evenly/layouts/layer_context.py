"""One layer with the placements of its tensors, and one option to compute it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from evenly.layouts.cuts import DimCuts
from evenly.layouts.preferred_units import PreferredUnits, parts_of
from evenly.spec.graph import Layer, Tensor
from evenly.spec.layout import COPIED, TensorPlacement

State = (
    frozenset[TensorPlacement] | None
)  # the placements in which a tensor is available; None: a parameter that was not used yet


@dataclass(frozen=True)
class LayerOption:
    """One option to compute a layer.

    `messages` are the collectives inside it, `summed` the elements that they sum, `gathered` those that they gather, or
    sum and scatter.
    """

    mode: str
    needs: tuple[TensorPlacement, ...]
    gives: tuple[TensorPlacement, ...]
    messages: int = 0
    summed: int = 0
    gathered: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether every rank computes everything."""
        return self.mode == "whole"


@dataclass(frozen=True)
class LayerContext:
    """One layer with its tensors and their placements."""

    layer: Layer
    inputs: tuple[Tensor, ...]
    states: tuple[State, ...]
    cuts: DimCuts
    preferred_units: PreferredUnits
    channels: dict[str, int]
    batches: Mapping[str, TensorPlacement]  # how tensors would be cut along the batch, where that is allowed
    shares: Mapping[str, tuple[float, ...]]  # of tensors whose layer has its own
    has_placed: bool = False  # whether parameters are cut already

    def sharded(self, index: int, dim: int, *, batch: bool = False) -> list[TensorPlacement]:
        """Returns the cuts along `dim` in which input `index` is available, and its canonical cut."""
        placements = sorted(r for r in self.states[index] or () if r.state == "sharded" and r.dim == dim)
        if batch or any(self.cuts.table[r.cut].rows for r in placements):
            return placements
        canonical = self.own_cut(self.inputs[index], dim)
        return placements if canonical in placements else [*placements, canonical]

    def cut_dims(self, index: int) -> list[TensorPlacement]:
        """Returns the cuts in which input `index` is available."""
        placements = sorted(r for r in self.states[index] or () if r.state == "sharded")
        batch_placement = self.batches.get(self.inputs[index].name)
        is_whole = not placements and self.has("replicated", index)
        if batch_placement is not None and is_whole and self.layer.kind == "mixing":
            return [batch_placement]
        return placements

    def own_cut(self, tensor: Tensor, dim: int) -> TensorPlacement:
        """Returns the canonical cut of a tensor: in its preferred units, by the shares of its layer."""
        shares = self.shares.get(tensor.name)
        return TensorPlacement("sharded", dim, self.cuts.of_parts(parts_of(self.preferred_units, tensor, dim), shares))

    def output_cut(self, dim: int, weight_dim: int) -> TensorPlacement:
        """Returns the cut of the output of a layer with a weight: that of the weight, if it is cut already."""
        placements = sorted(r for r in self.states[1] or () if r.state == "sharded" and r.dim == weight_dim)
        if self.has_placed and placements:
            return TensorPlacement("sharded", dim, placements[0].cut)
        return self.own_cut(self.layer.outputs[0], dim)

    def spread(self, index: int) -> list[TensorPlacement]:
        """Returns the cuts along its channels to which a partial sum can be reduce-scattered."""
        dim = self.channels.get(self.inputs[index].name)
        return [self.own_cut(self.inputs[index], dim)] if dim is not None and self.has("partial", index) else []

    def rows(self, placement: TensorPlacement) -> int:
        """Returns the rows per sample of a cut along the batch; 0 for other cuts."""
        return self.cuts.table[placement.cut].rows

    def has(self, state: str, index: int = 0) -> bool:
        """Whether input `index` is available in this state."""
        return any(r.state == state for r in self.states[index] or ())


def others(
    context: LayerContext, first: Sequence[TensorPlacement], placement: TensorPlacement
) -> tuple[TensorPlacement, ...]:
    """Returns the placements of all inputs: `first`, then `placement` for each other input."""
    return tuple(first) + (placement,) * (len(context.layer.inputs) - len(first))


def bystander(context: LayerContext, touched: Sequence[int]) -> Iterator[LayerOption]:
    """Yields options for inputs cut along a dim that the operation treats like a batch; parameters are copied."""
    for placement in context.cut_dims(0):
        if placement.dim not in touched:
            yield LayerOption(
                "bystander", others(context, [placement], COPIED), (placement,) * len(context.layer.outputs)
            )
