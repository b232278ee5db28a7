"""Module + optimizer + who is where -> the synchronized module."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from evenly._errors import SpecError
from evenly.comm import Alarm, Party, Waiter, Wire, backend_for, open_group, open_groups, ring_on_error
from evenly.nodes.bell import Bell
from evenly.nodes.checks import require_plain
from evenly.nodes.codecs import find_codec
from evenly.nodes.membership import StaticMembership
from evenly.nodes.policies import policies_of
from evenly.nodes.replicas import wire_of
from evenly.nodes.sharing import Sharing
from evenly.nodes.state import StatePlacement, require_resettable
from evenly.nodes.synchronized import Count, Synchronized
from evenly.spec import AnyPeriod, Cluster, EveryGradient, EverySeconds, Exchange, misfit


def join_nodes(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    party: Party,
    cluster: Cluster,
    period: AnyPeriod,
    exchange: Exchange | None = None,
    count: Count | None = None,
    scaler: torch.amp.GradScaler | None = None,
    parent: Alarm | None = None,
    find_unused_parameters: bool = False,
    state_placement: StatePlacement | None = None,
) -> Synchronized:
    """Returns `module` kept in step with the ranks of `party`; every rank calls it together.

    What rings the `parent` alarm rings here too. Of networks cut over ranks `state_placement` says how an entry of the
    optimizer's state is cut; without it, those of the parameter's shape are cut as the parameter is.
    """
    require_plain(module)
    exchange = exchange or Exchange()
    _require_fit(module, optimizer, period, exchange, ranks=party.size)
    joint = isinstance(period, EveryGradient)
    chapter = party.chapter("synchronize")
    own = cluster.nodes[cluster.node_of(party.rank)].ranks
    wire = _wire(module, party)
    alarm = Alarm(chapter, sharing=tuple(range(party.size)) if joint else own, parent=parent)
    with ring_on_error(alarm, closes=True):
        is_cut = _gather_all(chapter, alarm, is_cut=wire is not None, timeout_s=exchange.timeout_s)
        devices = [cluster.device_of(rank) for rank in range(party.size)]
        ways: Any = {"timeout_s": exchange.timeout_s, "joint_gradients": joint, "beside": exchange.overlap > 0}
        groups = open_groups(chapter, cluster.rank_lists(), devices, **ways)
        bell = _bell(period, chapter, own, timeout_s=exchange.timeout_s)
    sharing = Sharing(
        groups,
        alarm,
        is_cut=is_cut,
        wire=wire if is_cut else None,
        joint=joint,
        open_group=partial(_open, chapter, cluster, exchange),
        settings=exchange,
        state_placement=state_placement,
    )
    return Synchronized(
        module,
        optimizer,
        groups=groups,
        membership=StaticMembership(groups, in_step=bell is None),
        sharing=sharing,
        period=period,
        exchange=exchange,
        alarm=alarm,
        count=count,
        scaler=scaler,
        find_unused_parameters=find_unused_parameters,
        bell=bell,
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


def _bell(period: AnyPeriod, party: Party, node: Sequence[int], *, timeout_s: float) -> Bell | None:
    """Returns what ends periods that are counted in seconds."""
    if not isinstance(period, EverySeconds):
        return None
    return Bell(period.seconds, open_group(party, f"bell{node[0]}", node, backend="gloo", timeout_s=timeout_s))


def _wire(module: torch.nn.Module, party: Party) -> Wire | None:
    wire = wire_of(module)
    if wire is not None and wire.alarm.party.size > party.size:
        raise SpecError(
            f"a network cut over {wire.alarm.party.size} ranks was to be synchronized in a group of {party.size}. "
            "Give a group with all ranks that hold a part."
        )
    return wire


def _gather_all(party: Party, alarm: Alarm, *, is_cut: bool, timeout_s: float) -> bool:
    """Returns, when all ranks have come, whether any of them has a network that is cut."""
    party.store.add("cut", int(is_cut))
    Waiter(alarm, place="synchronize", timeout_s=timeout_s).roll_call()
    return party.size > 1 and party.store.add("cut", 0) > 0


def _open(party: Party, cluster: Cluster, exchange: Exchange, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Returns a group for a meeting of cut networks; those of another thread do not use NCCL, see `open_groups`."""
    beside = exchange.overlap > 0 and not name.startswith("gradients")
    backend = "gloo" if beside else backend_for([cluster.device_of(rank) for rank in ranks])
    return open_group(party, name, ranks, backend=backend, timeout_s=exchange.timeout_s, beside=beside)
