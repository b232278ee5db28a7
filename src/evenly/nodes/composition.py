"""Module + optimizer + ranks -> the synchronized module, in one way for all callers."""

from collections.abc import Callable

import torch

from evenly.comm import FailureMonitor, RankGroup
from evenly.coordination import CoordinationClient
from evenly.errors import SpecError
from evenly.nodes.join import join_nodes
from evenly.nodes.synchronized import Synchronized
from evenly.shards import GradScaler, Sharded
from evenly.shards.optim.optimizers import state_placement
from evenly.spec import AnyPeriod, Cluster, Exchange


def compose_synchronized(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank_group: RankGroup,
    cluster: Cluster,
    period: AnyPeriod,
    exchange: Exchange,
    count: Callable[..., float] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    find_unused_parameters: bool = False,
    parent: FailureMonitor | None = None,
    client: CoordinationClient | None = None,
) -> Synchronized:
    """Returns `module`, whole or cut over ranks, synchronized over the ranks of `rank_group`; all of them call it.

    Sessions, manual loops and calibration all call it, so that a network cut over ranks always gets what it needs (a
    scaler that checks all ranks, the placements of factored optimizer state).

    Raises:
        SpecError: where a scaler of torch is given for a network that is cut over ranks.
    """
    require_scaler(module, scaler)
    return join_nodes(
        module,
        optimizer,
        rank_group=rank_group,
        cluster=cluster,
        period=period,
        exchange=exchange,
        count=count,
        scaler=scaler,
        parent=parent,
        find_unused_parameters=find_unused_parameters,
        state_placement=state_placement,
        client=client,
    )


def require_scaler(model: torch.nn.Module, scaler: torch.amp.GradScaler | None) -> None:
    """Raises `SpecError` if one rank alone would decide to skip a step of a network that is cut over ranks."""
    if isinstance(model, Sharded) and scaler is not None and not isinstance(scaler, GradScaler):
        raise SpecError(
            "torch's GradScaler was given for a network that is cut over ranks; it checks one rank's part of the "
            "gradients and would skip steps on that rank alone. Use evenly.shards.GradScaler, with the same arguments."
        )
