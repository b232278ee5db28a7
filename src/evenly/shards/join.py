"""The verb: a network and shares, or a layout, give the module to call."""

from collections.abc import Mapping, Sequence

from torch import nn

from evenly._errors import SpecError
from evenly.comm import Alarm, Party, Wire, open_group
from evenly.graph import Example, Traced, follow
from evenly.planner import Rates, lay_out
from evenly.shards.sharded import Sharded
from evenly.spec.layout import Layout, check_shares


def shard_model(
    model: nn.Module,
    example: Example,
    *,
    party: Party,
    shares: Sequence[float],
    layer_shares: Mapping[str, Sequence[float]] | None = None,
    rates: Rates | None = None,
    timeout_s: float = 600.0,
) -> Sharded:
    """Returns the module of this rank; all ranks of the party call it with the same network and shares."""
    numbers = check_shares(shares, ranks=party.size)
    traced = follow(model, example)
    layout = lay_out(traced.graph, numbers, layer_shares=layer_shares, rates=rates)
    return join_shards(traced, layout, party=party, timeout_s=timeout_s)


def join_shards(traced: Traced, layout: Layout, *, party: Party, timeout_s: float = 600.0) -> Sharded:
    """Returns the module of this rank, cut as the layout says."""
    if layout.graph != traced.graph.fingerprint:
        raise SpecError(
            "the layout was made for another network, or for an example of another shape. Make a plan for this one."
        )
    room = party.chapter("shards")
    wire = Wire(
        open_group(room, "shards", layout.members, backend="gloo", timeout_s=timeout_s),
        Alarm(room),
        timeout_s=timeout_s,
    )
    return Sharded(traced, layout, wire, seed=0)
