"""Module + optimizer + who is where -> the synchronized module."""

import torch

from evenly.comm import Alarm, Party, Waiter, open_groups
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
    scaler: torch.amp.GradScaler | None = None,
    parent: Alarm | None = None,
    find_unused_parameters: bool = False,
) -> Synchronized:
    """Returns `module` kept in step with the ranks of `party`; every rank calls it together.

    What rings the `parent` alarm rings here too.
    """
    exchange = exchange or Exchange()
    joint = isinstance(period, EveryGradient)
    chapter = party.chapter("synchronize")
    own = cluster.nodes[cluster.node_of(party.rank)].ranks
    alarm = Alarm(chapter, sharing=tuple(range(party.size)) if joint else own, parent=parent)
    try:
        Waiter(alarm, place="synchronize", timeout_s=exchange.timeout_s).roll_call()
        groups = open_groups(
            chapter,
            cluster.rank_lists(),
            [cluster.device_of(rank) for rank in range(party.size)],
            timeout_s=exchange.timeout_s,
            joint_gradients=joint,
        )
    except BaseException as error:
        alarm.ring(error)
        alarm.close()
        raise
    return Synchronized(
        module,
        optimizer,
        groups=groups,
        membership=StaticMembership(groups),
        period=period,
        exchange=exchange,
        alarm=alarm,
        count=count,
        scaler=scaler,
        find_unused_parameters=find_unused_parameters,
    )
