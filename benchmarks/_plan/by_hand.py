"""Plans as a person would make them, to run beside the chosen one."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks._plan.clusters import BATCH_SIZE, BATCHES_BY_SPEED, EQUAL_BATCHES
from evenly.layouts import lay_out
from evenly.planner.costs import GraphCosts
from evenly.planner.memory import cut_needs
from evenly.spec import Cluster, Graph, Plan, Profile, Replica, Role, deal

Samples = dict[int, int]  # rank to samples of a step; a rank that is missing takes no part


@dataclass(frozen=True)
class MemoryLimits:
    """The memory of each rank: the samples that it holds of a whole network, and its bytes."""

    samples: list[int]
    size_bytes: list[int]


@dataclass(frozen=True)
class PlanningInputs:
    """What plans are made from."""

    cluster: Cluster
    profile: Profile
    graph: Graph
    memory: MemoryLimits | None

    @property
    def speeds(self) -> list[float]:
        """The speed of each rank: steps per second with the whole global batch."""
        return [1.0 / self.profile.devices[rank].step.at(BATCH_SIZE) for rank in range(self.cluster.world_size)]


def plans_by_hand(chosen: Plan, inputs: PlanningInputs) -> dict[str, Plan]:
    """Returns plans that fit into memory, by name; no two are equal, and none equals the chosen one."""
    samples_by_name = _simple_batches(inputs.speeds)
    samples_by_name |= _weighted_batches(inputs.speeds)
    samples_by_name |= _with_idle_ranks(chosen)
    if inputs.memory is not None:
        samples_by_name |= _batches_for_little_memory(inputs.speeds, inputs.memory.samples)
    plans = {
        name: _plan(samples, (), chosen, inputs.cluster)
        for name, samples in samples_by_name.items()
        if inputs.memory is None or _fits(samples, inputs.memory.samples)
    }
    all_samples = dict.fromkeys(range(inputs.cluster.world_size), BATCH_SIZE)
    for name, replica in _cut_replicas(inputs).items():
        plans[name] = _plan(all_samples, (replica,), chosen, inputs.cluster)
    return _distinct(plans, chosen)


def _fastest_first(speeds: Sequence[float]) -> list[int]:
    """Returns the ranks in the order of their speeds."""
    return sorted(range(len(speeds)), key=lambda rank: -speeds[rank])


def _deal_batch(ranks: Sequence[int], weights: Sequence[float], batch_size: int = BATCH_SIZE) -> Samples:
    """Returns the batch divided over these ranks in proportion to their weights."""
    return dict(zip(ranks, deal(batch_size, list(weights)), strict=True))


def _simple_batches(speeds: Sequence[float]) -> dict[str, Samples]:
    """Returns one rank alone, then all ranks and the fastest few, with equal batches and with batches by speed."""
    ranks = range(len(speeds))
    order = _fastest_first(speeds)
    samples_by_name = {
        "fastest alone": {order[0]: BATCH_SIZE},
        EQUAL_BATCHES: _deal_batch(ranks, [1.0] * len(ranks)),
        BATCHES_BY_SPEED: _deal_batch(ranks, speeds),
    }
    for count in range(2, len(order)):
        fastest = sorted(order[:count])
        samples_by_name[f"{count} fastest, equal batches"] = _deal_batch(fastest, [1.0] * count)
        samples_by_name[f"{count} fastest, by speed"] = _deal_batch(fastest, [speeds[rank] for rank in fastest])
    return samples_by_name


def _weighted_batches(speeds: Sequence[float]) -> dict[str, Samples]:
    """Returns batches by speed with the speeds changed, where every rank still gets a sample."""
    leader = _fastest_first(speeds)[0]
    weights = {
        "milder": [speed**0.5 for speed in speeds],
        "stronger": [speed**1.5 for speed in speeds],
        "a quarter more for the fastest": _scaled(speeds, leader, 1.25),
        "a quarter less for the fastest": _scaled(speeds, leader, 0.75),
    }
    samples_by_name = {
        f"{BATCHES_BY_SPEED}, {name}": _deal_batch(range(len(speeds)), weight) for name, weight in weights.items()
    }
    return {name: samples for name, samples in samples_by_name.items() if all(samples.values())}


def _scaled(speeds: Sequence[float], rank: int, factor: float) -> list[float]:
    """Returns the speeds with that of one rank multiplied."""
    return [speed * (factor if index == rank else 1.0) for index, speed in enumerate(speeds)]


def _with_idle_ranks(chosen: Plan) -> dict[str, Samples]:
    """Returns the samples of the chosen plan with one of them moved to a rank that it leaves out."""
    if chosen.replicas:
        return {}
    samples = {role.rank: role.samples for role in chosen.roles}
    idle = [rank for rank in samples if not samples[rank]]
    return {
        f"chosen, but a sample of rank {giver} for rank {rank}": {**samples, giver: samples[giver] - 1, rank: 1}
        for rank in idle
        for giver in samples
        if samples[giver] > 1
    }


def _batches_for_little_memory(speeds: Sequence[float], sample_limits: Sequence[int]) -> dict[str, Samples]:
    """Returns batches with 0, 1 and up to all samples that fit on the rank with the least memory."""
    smallest = min(range(len(speeds)), key=lambda rank: sample_limits[rank])
    others = [rank for rank in range(len(speeds)) if rank != smallest]
    counts = sorted({0, 1, *(sample_limits[smallest] * sixths // 6 for sixths in range(2, 7))})
    samples_by_name = {}
    for count in counts:
        samples = _deal_batch(others, [speeds[rank] for rank in others], BATCH_SIZE - count)
        samples_by_name[f"{count} for the one with little memory"] = {**samples, smallest: count}
    return samples_by_name


def _cut_replicas(inputs: PlanningInputs) -> dict[str, Replica]:
    """Returns the network cut over all ranks of a single node, where that fits; nothing for several nodes."""
    if len(inputs.cluster.nodes) > 1:
        return {}
    ranks = tuple(range(inputs.cluster.world_size))
    replicas = {}
    for name, shares, cut_batch in (
        ("cut, equal", [1.0] * len(ranks), False),
        ("cut by speed", inputs.speeds, False),
        ("cut by speed, batch too", inputs.speeds, True),
    ):
        layout = lay_out(inputs.graph, shares, cut_batch=cut_batch)
        if inputs.memory is not None:
            needs = cut_needs(GraphCosts(inputs.graph), layout, inputs.profile.sample_bytes)
            sizes = inputs.memory.size_bytes
            if any(need.samples_in(size) < BATCH_SIZE for need, size in zip(needs, sizes, strict=True)):
                continue
        replicas[name] = Replica(ranks=ranks, layout=layout)
    return replicas


def _fits(samples: Samples, sample_limits: Sequence[int]) -> bool:
    """Whether no rank gets more samples than its memory holds."""
    return all(count <= sample_limits[rank] for rank, count in samples.items())


def _plan(samples: Samples, replicas: tuple[Replica, ...], chosen: Plan, cluster: Cluster) -> Plan:
    """Returns a plan with these samples and the period of the chosen plan."""
    roles = [
        Role(
            rank=rank,
            node=cluster.node_of(rank),
            samples=samples.get(rank, 0),
            left_out="" if samples.get(rank) else "by hand",
        )
        for rank in range(cluster.world_size)
    ]
    return Plan(roles=tuple(roles), replicas=replicas, period=chosen.period)


def _distinct(plans: dict[str, Plan], chosen: Plan) -> dict[str, Plan]:
    """Returns the plans that differ from the chosen one and from those before them, without empty batches."""
    signatures = [_signature(chosen)]
    distinct = {}
    for name, plan in plans.items():
        signature = _signature(plan)
        if all(count > 0 for count in plan.batch_shares) and signature not in signatures:
            distinct[name] = plan
            signatures.append(signature)
    return distinct


def _signature(plan: Plan) -> tuple[list[int], list[tuple[tuple[int, ...], str]]]:
    """Returns samples and layouts: what makes a plan different from others."""
    layouts = [(replica.ranks, replica.layout.model_dump_json()) for replica in plan.replicas]
    return [role.samples for role in plan.roles], layouts
