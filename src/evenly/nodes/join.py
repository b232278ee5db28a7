"""Module + optimizer + nodes -> the synchronized module."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch

from evenly._torch.compiler import leave_uncompiled
from evenly.comm import (
    CollectiveWaiter,
    FailureMonitor,
    Group,
    RankGroup,
    ShardGroup,
    backend_for,
    open_group,
    open_group_inside,
    open_groups,
    report_on_error,
)
from evenly.comm.blocks.replicas import shard_group_of
from evenly.comm.consistency import digest
from evenly.coordination import CoordinationClient
from evenly.errors import SpecError
from evenly.exchange.codecs import find_codec
from evenly.exchange.elastic import ElasticMembership
from evenly.exchange.membership import Membership, StaticMembership
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.exchange.tensors.averaged_tensors import StatePlacement, require_resettable
from evenly.exchange.tensors.buffer_policies import policies_of
from evenly.nodes.checks import require_elastic, require_plain
from evenly.nodes.signature import describe
from evenly.nodes.synchronized import Count, Synchronized
from evenly.nodes.torch_shards import TorchShards, open_torch_shards
from evenly.schedule.period_timer import PeriodTimer
from evenly.spec import AnyPeriod, Cluster, EveryGradient, EverySeconds, Exchange, misfit

TRANSFER_S = 60.0  # the time limit of a transfer between the nodes of an elastic run


def join_nodes(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank_group: RankGroup,
    cluster: Cluster,
    period: AnyPeriod,
    exchange: Exchange | None = None,
    count: Count | None = None,
    scaler: torch.amp.GradScaler | None = None,
    parent: FailureMonitor | None = None,
    find_unused_parameters: bool = False,
    state_placement: StatePlacement | None = None,
    client: CoordinationClient | None = None,
) -> Synchronized:
    """Returns `module` synchronized over the ranks of `rank_group`; every rank calls it together.

    In an elastic run these are the ranks of this node, and `client` connects with the other nodes.
    Failures that the `parent` monitor sees fail here too. For networks cut over ranks `state_placement` gives the
    placement of an entry of the optimizer's state; without it, entries of the parameter's shape are cut like it.
    """
    leave_uncompiled(*UNCOMPILED)
    require_plain(module)
    exchange = exchange or Exchange()
    _require_fit(module, optimizer, period, exchange, ranks=rank_group.size)
    if client is not None:
        require_elastic(module, period, exchange, nodes=len(cluster.nodes))
    with ExitStack() as undo:
        torch_shards = open_torch_shards(module, timeout_s=exchange.timeout_s, parent=parent)
        if torch_shards is not None:
            undo.callback(torch_shards.close)
        synchronized = _join(
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
            torch_shards=torch_shards,
            client=client,
        )
        undo.pop_all()
    return synchronized


def _join(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank_group: RankGroup,
    cluster: Cluster,
    period: AnyPeriod,
    exchange: Exchange,
    count: Count | None,
    scaler: torch.amp.GradScaler | None,
    parent: FailureMonitor | None,
    find_unused_parameters: bool,
    state_placement: StatePlacement | None,
    torch_shards: TorchShards | None,
    client: CoordinationClient | None,
) -> Synchronized:
    global_gradients = isinstance(period, EveryGradient)
    scoped = rank_group.scoped("synchronize")
    node_ranks = cluster.nodes[cluster.node_of(rank_group.rank)].ranks
    shard_group = _shard_group(module, rank_group)
    gradient_ranks = tuple(range(rank_group.size)) if global_gradients else node_ranks
    monitor = FailureMonitor(scoped, averages_with=gradient_ranks, parent=parent)
    with report_on_error(monitor, closes=True):
        kinds = _network_kinds(scoped, monitor, shard_group, torch_shards, timeout_s=exchange.timeout_s)
        devices = [cluster.device_of(rank) for rank in range(rank_group.size)]
        groups = open_groups(
            scoped,
            cluster.rank_lists(),
            devices,
            timeout_s=exchange.timeout_s,
            global_gradients=global_gradients,
            concurrent=_sends_from_host(exchange),
        )
        groups.is_elastic = client is not None
        period_timer = _period_timer(period, scoped, node_ranks, timeout_s=exchange.timeout_s)
    replica_exchange = ReplicaExchange(
        groups,
        monitor,
        is_cut=kinds.is_cut,
        has_own_batches=kinds.have_own_batches,
        shard_group=shard_group if kinds.is_cut else None,
        global_gradients=global_gradients,
        open_group=partial(_open, scoped, cluster, exchange),
        settings=exchange,
        state_placement=state_placement,
    )
    membership: Membership = StaticMembership(groups, in_step=period_timer is None)
    if client is not None:
        membership = ElasticMembership(
            groups,
            client,
            signature=digest(describe(module, optimizer, f"{period!r}, {exchange!r}")),
            timeout_s=exchange.timeout_s,
            transfer_s=min(exchange.timeout_s, TRANSFER_S),
            concurrent=_sends_from_host(exchange),
        )
    return Synchronized(
        module,
        optimizer,
        groups=groups,
        membership=membership,
        replica_exchange=replica_exchange,
        period=period,
        exchange=exchange,
        monitor=monitor,
        count=count,
        scaler=scaler,
        find_unused_parameters=find_unused_parameters,
        period_timer=period_timer,
        torch_shards=torch_shards,
    )


def _require_fit(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, period: AnyPeriod, exchange: Exchange, *, ranks: int
) -> None:
    """Raises `SpecError` where settings do not fit each other, the optimizer or the buffers of the network."""
    if case := misfit(period, exchange):
        raise SpecError(f"the period and the exchange do not fit each other: {case}.")
    find_codec(exchange.codec)
    require_resettable(optimizer, exchange)
    if ranks > 1:
        policies_of(module, exchange)


def _period_timer(
    period: AnyPeriod, rank_group: RankGroup, node: Sequence[int], *, timeout_s: float
) -> PeriodTimer | None:
    """Returns the timer of periods in seconds; None for other periods."""
    if not isinstance(period, EverySeconds):
        return None
    return PeriodTimer(
        period.seconds, open_group(rank_group, f"period_timer{node[0]}", node, backend="gloo", timeout_s=timeout_s)
    )


def _shard_group(module: torch.nn.Module, rank_group: RankGroup) -> ShardGroup | None:
    shard_group = shard_group_of(module)
    if shard_group is not None and shard_group.monitor.rank_group.size > rank_group.size:
        raise SpecError(
            f"a network cut over {shard_group.monitor.rank_group.size} ranks was to be synchronized in a group of "
            f"{rank_group.size}. Give a group with all ranks that hold a part."
        )
    return shard_group


UNCOMPILED = tuple(f"evenly.{name}" for name in ("nodes", "gradients", "exchange", "schedule", "comm"))
"""What a compiled training step calls as it is: hooks, clocks and collectives."""


class _NetworkKinds(NamedTuple):
    """What some of the ranks have."""

    is_cut: bool  # a network that several ranks hold together
    have_own_batches: bool  # one whose ranks have a batch each, by FSDP


def _network_kinds(
    rank_group: RankGroup,
    monitor: FailureMonitor,
    shard_group: ShardGroup | None,
    torch_shards: TorchShards | None,
    *,
    timeout_s: float,
) -> _NetworkKinds:
    """Waits for all ranks; returns what kinds of networks there are among them.

    All of them raise `SpecError` if these cannot be averaged: a rank that went on would wait for connections.
    """
    is_cut = shard_group is not None
    has_own_batches = torch_shards is not None and torch_shards.has_own_batches
    rank_group.store.add("fsdp", int(has_own_batches))
    rank_group.store.add("cut", int(is_cut and not has_own_batches))
    CollectiveWaiter(monitor, label="synchronize", timeout_s=timeout_s).barrier()
    if rank_group.size == 1:
        return _NetworkKinds(is_cut=False, have_own_batches=False)
    by_fsdp, otherwise = (rank_group.store.add(kind, 0) for kind in ("fsdp", "cut"))
    if by_fsdp and otherwise:
        raise SpecError(
            f"{by_fsdp} ranks shard the network by FSDP, where each has a batch of its own, and {otherwise} by "
            "evenly.shard or by hand, where ranks share a batch; buffers of the two cannot be averaged. Shard it in "
            "one way on all nodes; a node of one rank may hold it whole."
        )
    return _NetworkKinds(is_cut=by_fsdp + otherwise > 0, have_own_batches=by_fsdp > 0)


def _sends_from_host(exchange: Exchange) -> bool:
    """Whether exchanges need groups that another thread may use, or that send what is in host memory."""
    return exchange.overlap > 0 or exchange.offload


def _open(rank_group: RankGroup, cluster: Cluster, exchange: Exchange, name: str, ranks: Sequence[int]) -> Group:
    """Returns a group for reductions of cut networks; gloo if a background thread uses it, see `open_groups`."""
    concurrent = _sends_from_host(exchange) and not name.startswith("gradients")
    devices = [cluster.device_of(rank) for rank in ranks]
    if len({cluster.node_of(rank) for rank in ranks}) == 1 and not concurrent:
        return open_group_inside(rank_group, name, ranks, devices, timeout_s=exchange.timeout_s)
    backend = "gloo" if concurrent else backend_for(devices)
    return open_group(rank_group, name, ranks, backend=backend, timeout_s=exchange.timeout_s, concurrent=concurrent)
