"""A network cut as the planner finds best among the layouts that cut it."""

import sys

import torch
import torch.distributed as dist

from evenly.comm import rank_group_of
from evenly.graph import Traced
from evenly.planner.costs import GraphCosts
from evenly.planner.replica_options import eased, replica_options_of
from evenly.session.by_hand import measure_rank_group
from evenly.shards import Sharded, join_shards
from evenly.spec import Cluster


def plan_network(traced: Traced, cluster: Cluster, device: torch.device, *, quick: bool) -> Sharded | None:
    """Returns the network cut as the planner finds best for the ranks as they are measured now.

    Some of the ranks may be left out; None on these.
    """
    profile = measure_rank_group(rank_group_of(), traced, cluster, device, quick=quick, timeout_s=600.0)
    graph_costs, everybody = GraphCosts(traced.graph), range(cluster.world_size)
    order = sorted(everybody, key=lambda rank: profile.devices[rank].step.at(profile.batch_size))
    groups = [tuple(sorted(order[:count])) for count in range(2, cluster.world_size + 1)]
    options = [
        eased(option, option.ranks, everybody)
        for ranks in groups
        for option in replica_options_of(ranks, graph_costs, profile)
    ]
    best = min(options, key=lambda option: option.seconds(profile.batch_size))
    if best.layout is None:
        raise RuntimeError("the planner left the network whole")
    if dist.get_rank() == 0:
        print(f"planned for {best.ranks}, predicted {best.seconds(profile.batch_size):.3f} s", file=sys.stderr)
        print(best.layout.explain(), file=sys.stderr, flush=True)
    if dist.get_rank() not in best.ranks:
        return None
    return join_shards(traced, best.layout, rank_group=rank_group_of().among(best.ranks, "planned"))
