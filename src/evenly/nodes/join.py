"""Module + optimizer + who is where -> the synchronized module."""

import torch

from evenly.comm import Party, open_groups
from evenly.nodes.membership import StaticMembership
from evenly.nodes.synchronized import Count, Synchronized
from evenly.spec import Cluster, EveryEpoch, EveryGradient, EverySteps, Exchange


def join_nodes(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    party: Party,
    cluster: Cluster,
    period: EverySteps | EveryEpoch | EveryGradient,
    exchange: Exchange | None = None,
    count: Count | None = None,
    find_unused_parameters: bool = False,
) -> Synchronized:
    """Returns `module` kept in step with the ranks of `party`; every rank calls it together."""
    exchange = exchange or Exchange()
    groups = open_groups(
        party.chapter("synchronize"),
        cluster.rank_lists(),
        [cluster.device_of(rank) for rank in range(party.size)],
        timeout_s=exchange.timeout_s,
        joint_gradients=isinstance(period, EveryGradient),
    )
    return Synchronized(
        module,
        optimizer,
        groups=groups,
        membership=StaticMembership(groups),
        period=period,
        exchange=exchange,
        count=count,
        find_unused_parameters=find_unused_parameters,
    )
