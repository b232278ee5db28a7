"""Networks cut over the ranks of a node, inside a session: their plans and optimizers."""

import gc
from collections.abc import Sequence

import torch

from evenly._torch.compiler import uncompiled
from evenly._torch.dtensor import fsdp_modules, is_dtensor
from evenly.errors import SpecError
from evenly.graph import Example, trace, trace_module
from evenly.layouts import TransferCosts, lay_out
from evenly.session.active_ranks import ActiveRanks
from evenly.session.verifying import verify_on_first_batch
from evenly.shards import Sharded, example_of, join_shards
from evenly.spec import Cluster, Plan, Replica


def plan_replicas(
    model: torch.nn.Module | None,
    example: Example | None,
    cluster: Cluster,
    shares: Sequence[float] | None,
    *,
    cut_batch: bool = False,
) -> tuple[Replica, ...]:
    """Returns the replicas of every node: as many ranks each as there are shares, one after another; none without."""
    if shares is None:
        return ()
    if model is None or example is None:
        raise SpecError("shares were given without a network. Give the model and an example too: plan(model, example).")
    rates = TransferCosts.of_devices(device for node in cluster.nodes for device in node.devices)
    layout = lay_out(trace(model, example), shares, rates=rates, cut_batch=cut_batch)
    replicas = []
    for node in cluster.nodes:
        if len(node.ranks) % len(shares):
            raise SpecError(
                f"{len(shares)} shares {list(shares)} were given, but node {node.name!r} has {len(node.ranks)} ranks: "
                f"{len(node.ranks)} ranks cannot be divided into networks of {len(shares)}. Give one share for each "
                "rank that holds a part of a network, 0 to leave one out, or start a multiple of that many ranks."
            )
        for start in range(0, len(node.ranks), len(shares)):
            replicas.append(Replica(ranks=node.ranks[start : start + len(shares)], layout=layout))
    return tuple(replicas)


def require_own_batches(model: torch.nn.Module, ranks: int) -> None:
    """Raises `SpecError` for a network whose ranks need one batch, where each of several is given its own."""
    if ranks > 1 and any(map(is_dtensor, model.parameters())) and not fsdp_modules(model):
        raise SpecError(
            "a network with DTensors, made by hand, was to be prepared with a dataset: its ranks need the same batch, "
            "and a session gives each rank its own. Use evenly.synchronize and deal the batches yourself, or shard it "
            "by fully_shard, or let the plan cut it: session.plan(shares=...)."
        )


def shard_for(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    active_ranks: ActiveRanks,
    *,
    timeout_s: float,
    verify: bool = False,
) -> torch.nn.Module:
    """Returns this rank's part of the network if the plan cuts it, and points the optimizer to it; else the network."""
    rank_group, cluster = active_ranks.rank_group, active_ranks.cluster
    replica = plan.replica_of(rank_group.rank)
    if replica is None:
        return model
    model = uncompiled(model)
    sharded = join_shards(
        trace_module(model, example_of(replica.layout)),
        replica.layout,
        rank_group=rank_group.among(replica.ranks, f"replica{replica.ranks[0]}"),
        devices=[cluster.device_of(rank) for rank in replica.ranks],
        timeout_s=timeout_s,
        parent=active_ranks.monitor,
    )
    gc.collect()  # traces refer to the whole network in circles, which would keep its weights
    retarget_optimizer(optimizer, model, sharded)
    if verify:
        verify_on_first_batch(model, sharded, next((role for role in plan.roles if role.rank == rank_group.rank), None))
    return sharded


def retarget_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, sharded: Sharded) -> None:
    """Points an optimizer over the parameters of `model` to those of `sharded`."""
    if optimizer.state:
        raise SpecError(
            "the optimizer has made steps already, but the network is cut only now. Prepare it first, or load its "
            "state afterwards with evenly.shards.load_full_state_dict."
        )
    parts = dict(sharded.named_parameters())
    part_of = {id(parameter): parts[name] for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        foreign_shapes = [tuple(p.shape) for p in group["params"] if id(p) not in part_of]
        if foreign_shapes:
            raise SpecError(
                f"the optimizer has a parameter of shape {foreign_shapes[0]} that is not the network's. "
                "Make the optimizer over the parameters of the network that is prepared."
            )
        group["params"] = [part_of[id(parameter)] for parameter in group["params"]]
