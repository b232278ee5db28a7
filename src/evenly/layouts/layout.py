"""Graph + shares -> Layout: the placement of every tensor, chosen so that few bytes are sent."""

from collections.abc import Mapping, Sequence

from evenly.errors import SpecError
from evenly.layouts.cuts import DimCuts
from evenly.layouts.search import Placed, Search, TransferCosts
from evenly.spec.graph import Graph
from evenly.spec.layout import Choice, Layout, check_shares, deal


def lay_out(
    graph: Graph,
    shares: Sequence[float],
    *,
    layer_shares: Mapping[str, Sequence[float]] | None = None,
    modes: Mapping[str, Sequence[str]] | None = None,
    rates: TransferCosts | None = None,
    cut_batch: bool = False,
    placed: Mapping[str, Placed] | None = None,
) -> Layout:
    """Returns the cheapest layout of a network over ranks with these shares.

    Args:
        graph: the network.
        shares: one number for each rank; 0 leaves the rank out.
        layer_shares: shares of single layers, by module name or the beginning of it; 0 leaves a rank out of that layer.
        modes: for operations by name, the modes that they may have.
        rates: the cost of moving compared with computing.
        cut_batch: whether layers may also be cut along the batch, where that sends fewer bytes.
        placed: how parameters and buffers are cut already, by name; those not named are free.
    """
    numbers = check_shares(shares)
    unknown_layers = set(modes or {}) - {layer.name for layer in graph.layers}
    if unknown_layers:
        raise SpecError(
            f"modes were given for {sorted(unknown_layers)}, which are not operations of the network. Correct them."
        )
    members = tuple(rank for rank, share in enumerate(numbers) if share > 0)
    if cut_batch and graph.batch_size < 2:
        raise SpecError("cut_batch=True was asked for, but the example has fewer than 2 samples. Give a larger one.")
    may_cut_batch = cut_batch or any(layer.op == "recurrent" for layer in graph.layers)
    batch_size = graph.batch_size if may_cut_batch and graph.batch_size > 1 else 0
    cuts = DimCuts([numbers[rank] for rank in members], batch=batch_size)
    shares_by_tensor = _shares_by_tensor(graph, {} if layer_shares is None else layer_shares, len(numbers), members)
    search = Search(
        graph, cuts, rates or TransferCosts(), modes or {}, shares_by_tensor, cut_batch=cut_batch, placed=placed or {}
    )
    steps = search.run().steps()
    return Layout(
        graph=graph.fingerprint,
        inputs=tuple(
            layer.outputs[0].model_copy(update={"name": layer.where})
            for layer in graph.layers
            if layer.op == "input" and layer.outputs
        ),
        shares=numbers,
        members=members,
        cuts=tuple(cuts.table),
        choices=tuple(step.choice for step in steps),
        moves=tuple(move for step in steps for move in step.moves),
    )


def relaid(graph: Graph, layout: Layout, factors: Sequence[float], *, unit: int = 1) -> Layout:
    """Returns the same layout with other shares: every rank has `factors[rank]` times what it had of each layer.

    The modes of layers stay the same.

    Args:
        graph: the network.
        layout: how it is cut.
        factors: one number above 0 for each rank.
        unit: the multiple in which wide layers are cut.
    """
    shares = [share * factor for share, factor in zip(layout.shares, factors, strict=True)]
    layer_shares = {
        choice.where: _new_counts(layout, choice, factors, unit)
        for choice in layout.choices
        if choice.mode in ("partitioned", "units") and choice.where
    }
    cut_batch = any(cut.rows for cut in layout.cuts)
    modes = {choice.layer: [choice.mode] for choice in layout.choices if choice.mode != "source"}
    return lay_out(graph, shares, layer_shares=layer_shares, modes=modes, cut_batch=cut_batch)


LEAST = 0.25  # units counted for a rank that has none in a layer, so that its share can grow
WIDE = 4  # a layer is cut in larger units if there are so many of them for each rank


def _new_counts(layout: Layout, choice: Choice, factors: Sequence[float], unit: int) -> list[float]:
    """Returns the outputs of a layer that each rank is to have, in multiples of `unit` where there are many of them."""
    counts = [count * factor for count, factor in zip(_output_counts(layout, choice), factors, strict=True)]
    size = next(layout.cuts[placement.cut].size for placement in choice.gives if placement.state == "sharded")
    if size % unit or size // unit < WIDE * len(counts):
        return counts
    return [float(unit * count) for count in deal(size // unit, counts)]


def _output_counts(layout: Layout, choice: Choice) -> list[float]:
    """Returns how many outputs of a layer each rank has."""
    placement = next(placement for placement in choice.gives if placement.state == "sharded")
    counts = dict(zip(layout.members, layout.cuts[placement.cut].counts(), strict=True))
    return [max(LEAST, counts[rank]) if rank in counts else 0.0 for rank in range(len(layout.shares))]


def _shares_by_tensor(
    graph: Graph, layer_shares: Mapping[str, Sequence[float]], ranks: int, members: tuple[int, ...]
) -> dict[str, tuple[float, ...]]:
    """Returns the shares of every tensor whose layer is named in `layer_shares`."""
    if not isinstance(layer_shares, Mapping) or not all(isinstance(prefix, str) for prefix in layer_shares):
        raise SpecError(f"layer_shares={layer_shares!r} was given, but a dict from module names to shares is needed.")
    checked = {prefix: check_shares(shares, ranks=ranks) for prefix, shares in layer_shares.items()}
    for prefix, shares in checked.items():
        non_members = [rank for rank, share in enumerate(shares) if share and rank not in members]
        if non_members or not any(_is_in(layer.where, prefix) for layer in graph.layers):
            case = f"ranks {non_members} have no share of the network" if non_members else "no module has that name"
            raise SpecError(f"shares of the layer {prefix!r} were given, but {case}. Correct the name or the shares.")
    shares_by_tensor: dict[str, tuple[float, ...]] = {}
    for layer in graph.layers:
        prefixes = [prefix for prefix in checked if layer.kind == "mixing" and _is_in(layer.where, prefix)]
        tensor_shares = tuple(checked[max(prefixes, key=len)][rank] for rank in members) if prefixes else None
        if not tensor_shares and layer.inputs and layer.kind != "mixing":
            tensor_shares = shares_by_tensor.get(layer.inputs[0])
        shares_by_tensor |= {tensor.name: tensor_shares for tensor in layer.outputs if tensor_shares}
    return shares_by_tensor


def _is_in(where: str, prefix: str) -> bool:
    return where == prefix or where.startswith(prefix + ".")
