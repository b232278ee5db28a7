"""What if: a slower wire, a slower rank, one device more. Values in, values out."""

import re
from collections.abc import Sequence

from evenly.cli._quantities import factor_of
from evenly.errors import SpecError
from evenly.spec import (
    Adaptive,
    Cluster,
    DeviceProfile,
    EverySteps,
    Graph,
    Link,
    Node,
    Plan,
    Profile,
    Rate,
    period_of,
)


def with_period(plan: Plan, period: str) -> Plan:
    """Returns the plan with another period K'."""
    return Plan(**{**dict(plan), "period": period_of(period)})


def settled(plan: Plan, cluster: Cluster, profile: Profile, graph: Graph) -> Plan:
    """Returns the plan; if its period follows a budget, with the steps that keep it as the first period."""
    from evenly.planner import simulate

    period = plan.period
    if not isinstance(period, Adaptive):
        return plan
    waits = plan.exchange.model_copy(update={"overlap": 0, "fragments": 1})
    every = plan.model_copy(update={"period": EverySteps(1), "exchange": waits})
    seen = simulate(every, cluster, profile, graph, steps=1)
    begun = plan.exchange.begun(period, step_s=seen.seconds - seen.exchange_s, exchange_s=seen.exchange_s)
    return plan.model_copy(update={"period": begun})


def with_link(profile: Profile, cluster: Cluster, factor: float) -> Profile:
    """Returns the profile with `factor` times the bandwidth on all ways between nodes."""
    factor_of(factor, "--link")
    lanes = tuple(
        lane
        if cluster.node_of(lane.source) == cluster.node_of(lane.target)
        else lane.model_copy(update={"rate": _times(lane.rate, factor)})
        for lane in profile.lanes
    )
    return Profile(**{**dict(profile), "lanes": lanes, "across": _times(profile.across, factor)})


def with_slow(profile: Profile, wish: str) -> Profile:
    """Returns the profile with one rank faster or slower: `RANK=FACTOR`."""
    found = re.fullmatch(r"(\d+)=([^=]+)", wish.strip())
    try:
        rank, factor = (int(found[1]), float(found[2])) if found else (0, 0.0)
    except ValueError:
        found = None
    if found is None:
        raise SpecError(f"--slow {wish} was given. Write --slow RANK=FACTOR, such as --slow 2=0.25 for a quarter.")
    if rank >= len(profile.devices):
        raise SpecError(
            f"--slow {wish} was given, but the ranks are 0 to {len(profile.devices) - 1}. Give one of these."
        )
    seconds = 1 / factor_of(factor, f"--slow {rank}=")
    devices = tuple(d.scaled(seconds) if d.rank == rank else d for d in profile.devices)
    return Profile(**{**dict(profile), "devices": devices})


def with_device(cluster: Cluster, profile: Profile, wish: str) -> tuple[Cluster, Profile]:
    """Returns cluster and profile with one more rank: `NODE`, or `NODE:like RANK`.

    Its device is that of RANK, its wires those of the first rank of the node. The number after the last node is a new
    node.
    """
    index, like = _place(cluster, wish)
    new = cluster.world_size
    nodes, old = list(cluster.nodes), cluster.device_of(like)
    if index == len(nodes):
        nodes.append(Node(name=f"added{index}", ranks=(new,), devices=(old,)))
    else:
        node = nodes[index]
        nodes[index] = Node(name=node.name, ranks=(*node.ranks, new), devices=(*node.devices, old))
    wider = Cluster(**{**dict(cluster), "nodes": tuple(nodes)})
    added = DeviceProfile(**{**dict(profile.devices[like]), "rank": new})
    near = nodes[index].ranks[:-1]
    changes = {
        "cluster": wider.fingerprint,
        "devices": (*profile.devices, added),
        "lanes": (*profile.lanes, *_lanes(profile, near, new)),
    }
    return wider, Profile(**{**dict(profile), **changes})


def plan_anew(plan: Plan, cluster: Cluster, profile: Profile, graph: Graph) -> Plan:
    """Returns a plan for a changed cluster with what is known of the wishes behind an older one."""
    from evenly.planner import plan as find_plan

    wishes = {"batch_size": plan.batch_size or None, "every": plan.period, "cut": bool(plan.replicas)}
    return find_plan(cluster, profile, graph, exchange=plan.exchange, **wishes)  # type: ignore[arg-type]  # each fits


def _place(cluster: Cluster, wish: str) -> tuple[int, int]:
    """Returns the node that a device is added to, and the rank that it is like."""
    found = re.fullmatch(r"\s*(.+?)\s*(?::\s*(?:like\s*)?(\d+))?\s*", wish)
    name, like = (found[1], found[2]) if found else (wish, None)
    names = [node.name for node in cluster.nodes]
    index = names.index(name) if name in names else int(name) if name.isdecimal() else -1
    if not 0 <= index <= len(names) or (like is not None and int(like) >= cluster.world_size):
        raise SpecError(
            f"--add {wish} was given, but the nodes are 0 to {len(names) - 1} ({', '.join(names[:8])}) and the ranks 0 "
            f"to {cluster.world_size - 1}. Write --add 0, --add 0:like 2, or --add {len(names)} for a new node."
        )
    first = cluster.nodes[index].ranks[0] if index < len(names) else 0
    return index, first if like is None else int(like)


def _lanes(profile: Profile, near: Sequence[int], new: int) -> list[Link]:
    """Returns the ways of a new rank inside its node: like those of the node's first rank."""
    found = []
    for lane in profile.lanes:
        if lane.source in near and lane.target in near and near[0] in (lane.source, lane.target):
            ends = {"source": new} if lane.source == near[0] else {"target": new}
            found.append(lane.model_copy(update=ends))
    return found


def _times(rate: Rate, factor: float) -> Rate:
    return Rate(latency_s=rate.latency_s, bytes_per_s=rate.bytes_per_s * factor)


def require_samples(plan: Plan, graph: Graph, cluster: Cluster) -> None:
    """Raises `SpecError` unless the plan is for this network and cluster and says who takes which samples."""
    if len(plan.roles) != cluster.world_size or plan.nodes != cluster.rank_lists():
        raise SpecError(
            f"a plan for {len(plan.roles)} ranks on the nodes {_short(plan.nodes)} was given for a cluster of "
            f"{cluster.world_size} on {_short(cluster.rank_lists())}. Plan for this cluster: evenly plan."
        )
    if plan.graph and plan.graph != graph.fingerprint:
        raise SpecError(
            f"the plan was made for another network (fingerprint {plan.graph}, this one has {graph.fingerprint}). "
            "Plan for this one: evenly plan."
        )
    if not any(role.samples for role in plan.roles):
        raise SpecError("the plan gives no rank any samples, so there is nothing to simulate. Make one: evenly plan.")


def _short(nodes: list[list[int]]) -> str:
    text = str(nodes)
    return text if len(text) <= 60 else text[:57] + "..."
