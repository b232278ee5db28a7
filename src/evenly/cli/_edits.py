"""What-if changes of `evenly simulate`: another bandwidth, a slower rank, an added device."""

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
    """Returns the plan; an adaptive period with a budget starts with the number of steps that meets it."""
    from evenly.planner import simulate

    period = plan.period
    if not isinstance(period, Adaptive):
        return plan
    blocking_exchange = plan.exchange.model_copy(update={"overlap": 0, "fragments": 1})
    synchronous_plan = plan.model_copy(update={"period": EverySteps(1), "exchange": blocking_exchange})
    forecast = simulate(synchronous_plan, cluster, profile, graph, steps=1)
    adaptive_period = plan.exchange.with_affordable_start(
        period, step_s=forecast.seconds - forecast.exchange_s, exchange_s=forecast.exchange_s
    )
    return plan.model_copy(update={"period": adaptive_period})


def with_link(profile: Profile, cluster: Cluster, factor: float) -> Profile:
    """Returns the profile with `factor` times the bandwidth on all links between nodes."""
    factor_of(factor, "--link")
    links = tuple(
        link
        if cluster.node_of(link.source) == cluster.node_of(link.target)
        else link.model_copy(update={"rate": _times(link.rate, factor)})
        for link in profile.lanes
    )
    return Profile(**{**dict(profile), "lanes": links, "across": _times(profile.across, factor)})


def with_slow(profile: Profile, option: str) -> Profile:
    """Returns the profile with one rank faster or slower: `RANK=FACTOR`."""
    match = re.fullmatch(r"(\d+)=([^=]+)", option.strip())
    try:
        rank, factor = (int(match[1]), float(match[2])) if match else (0, 0.0)
    except ValueError:
        match = None
    if match is None:
        raise SpecError(f"--slow {option} was given. Write --slow RANK=FACTOR, such as --slow 2=0.25 for a quarter.")
    if rank >= len(profile.devices):
        raise SpecError(
            f"--slow {option} was given, but the ranks are 0 to {len(profile.devices) - 1}. Give one of these."
        )
    seconds = 1 / factor_of(factor, f"--slow {rank}=")
    devices = tuple(d.scaled(seconds) if d.rank == rank else d for d in profile.devices)
    return Profile(**{**dict(profile), "devices": devices})


def with_device(cluster: Cluster, profile: Profile, option: str) -> tuple[Cluster, Profile]:
    """Returns cluster and profile with one more rank: `NODE`, or `NODE:like RANK`.

    The new rank has the device of RANK and the links of the node's first rank. The index after the last node adds a
    node.
    """
    index, like = _parse_added_device(cluster, option)
    new_rank = cluster.world_size
    nodes, device = list(cluster.nodes), cluster.device_of(like)
    if index == len(nodes):
        nodes.append(Node(name=f"added{index}", ranks=(new_rank,), devices=(device,)))
    else:
        node = nodes[index]
        nodes[index] = Node(name=node.name, ranks=(*node.ranks, new_rank), devices=(*node.devices, device))
    wider = Cluster(**{**dict(cluster), "nodes": tuple(nodes)})
    added = DeviceProfile(**{**dict(profile.devices[like]), "rank": new_rank})
    neighbours = nodes[index].ranks[:-1]
    changes = {
        "cluster": wider.fingerprint,
        "devices": (*profile.devices, added),
        "lanes": (*profile.lanes, *_links_of_added(profile, neighbours, new_rank)),
    }
    return wider, Profile(**{**dict(profile), **changes})


def plan_anew(plan: Plan, cluster: Cluster, profile: Profile, graph: Graph) -> Plan:
    """Returns a plan for a changed cluster with the batch size, period and cuts of an older one."""
    from evenly.planner import plan as find_plan

    wishes = {"batch_size": plan.batch_size or None, "every": plan.period, "cut": bool(plan.replicas)}
    return find_plan(cluster, profile, graph, exchange=plan.exchange, **wishes)  # type: ignore[arg-type]  # each fits


def _parse_added_device(cluster: Cluster, option: str) -> tuple[int, int]:
    """Returns the node that gets the device, and the rank whose device it copies."""
    match = re.fullmatch(r"\s*(.+?)\s*(?::\s*(?:like\s*)?(\d+))?\s*", option)
    name, like = (match[1], match[2]) if match else (option, None)
    names = [node.name for node in cluster.nodes]
    index = names.index(name) if name in names else int(name) if name.isdecimal() else -1
    if not 0 <= index <= len(names) or (like is not None and int(like) >= cluster.world_size):
        raise SpecError(
            f"--add {option} was given, but the nodes are 0 to {len(names) - 1} ({', '.join(names[:8])}) and the ranks "
            f"0 to {cluster.world_size - 1}. Write --add 0, --add 0:like 2, or --add {len(names)} for a new node."
        )
    default_rank = cluster.nodes[index].ranks[0] if index < len(names) else 0
    return index, default_rank if like is None else int(like)


def _links_of_added(profile: Profile, neighbours: Sequence[int], new_rank: int) -> list[Link]:
    """Returns the links of a new rank inside its node: copies of those of the node's first rank."""
    links = []
    for link in profile.lanes:
        if link.source in neighbours and link.target in neighbours and neighbours[0] in (link.source, link.target):
            ends = {"source": new_rank} if link.source == neighbours[0] else {"target": new_rank}
            links.append(link.model_copy(update=ends))
    return links


def _times(rate: Rate, factor: float) -> Rate:
    return Rate(latency_s=rate.latency_s, bytes_per_s=rate.bytes_per_s * factor)


def require_samples(plan: Plan, graph: Graph, cluster: Cluster) -> None:
    """Raises `SpecError` unless the plan is for this network and cluster and gives ranks samples."""
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
