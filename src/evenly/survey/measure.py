"""Cluster -> Profile: all ranks time the network on their devices at once, pairs of ranks time their link."""

import platform
from collections.abc import Callable, Sequence
from itertools import combinations

import torch

from evenly.comm import FailureMonitor, GroupContext, RankGroup, open_context
from evenly.errors import SpecError
from evenly.graph import Traced
from evenly.spec import Cluster, CollectiveTimings, Curve, DeviceProfile, Link, Profile
from evenly.survey.collective_timings import measure_collectives
from evenly.survey.devices import DeviceSurvey, require_training
from evenly.survey.links import measure_links
from evenly.survey.pooling import pooled

QUICK_S, THOROUGH_S = 4.0, 60.0
MOST_COLLECTIVE_RANKS = 16  # larger nodes do not measure collectives
ROW_S = 0.08  # of repeated collectives, if the budget allows
MOST_PAIRS = 28  # of a node of 8; larger nodes measure only neighbours in a ring


def measure_cluster(
    rank_group: RankGroup,
    traced: Traced,
    cluster: Cluster,
    device: torch.device,
    *,
    quick: bool = False,
    memory_bytes: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
    timeout_s: float = 600.0,
    parent: FailureMonitor | None = None,
) -> Profile:
    """Returns the profile of a cluster for one network and batch; all ranks call it together."""
    budget_s = QUICK_S if quick else THOROUGH_S
    with open_context(
        rank_group, "measure", label="the measurement of devices", timeout_s=timeout_s, parent=parent
    ) as context:
        node = cluster.nodes[cluster.node_of(rank_group.rank)]
        require_training(traced)
        survey = DeviceSurvey(traced, device, budget_s=budget_s, tell=tell)
        ranks_here = sum(_shares_device(cluster, rank_group.rank, neighbour) for neighbour in node.ranks)
        free_bytes = _usable(survey.free_bytes(ranks_here), memory_bytes)
        context.meet()  # so that all ranks measure at the same time
        step = survey.step()
        mine = DeviceProfile(
            rank=rank_group.rank,
            step=step,
            layers=survey.layers(step),
            free_bytes=free_bytes,
            unit=_unit(device, traced),
            spread=survey.spread,
        )
        links = _measure_links_of_rank(context, cluster, device, budget_s, tell)
        device_rows = context.gather(mine.model_dump())
        link_rows = context.gather([link.model_dump() for link in links])
        sample_bytes = max(context.gather(survey.sample_bytes()))
        batch = max(1, traced.graph.batch_size)
        devices = _completed(pooled([DeviceProfile(**row) for row in device_rows], cluster, batch), batch)
        steps = [device_profile.step for device_profile in devices]
        timings = _collectives(context, cluster, steps, batch, device, budget_s, tell)
        timing_rows = context.gather([timing.model_dump() for timing in timings])
    return Profile(
        cluster=cluster.fingerprint,
        graph=traced.graph.fingerprint,
        batch_size=batch,
        devices=tuple(devices),
        meetings=tuple(CollectiveTimings(**timing) for row in timing_rows for timing in row),
        lanes=tuple(Link(**link) for row in link_rows for link in row),
        sample_bytes=sample_bytes,
        versions=versions(),
    )


def _usable(free_bytes: int, limit_bytes: int | None) -> int:
    """Returns the memory that plans may use on this rank."""
    if limit_bytes is None:
        return free_bytes
    if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or limit_bytes <= 0:
        raise SpecError(
            f"memory_bytes={limit_bytes} was given to measure, but it is what this rank may use: one whole number "
            "above 0. Give it in bytes, on each rank its own, or leave it out."
        )
    return min(free_bytes, limit_bytes)


def _shares_device(cluster: Cluster, rank: int, other: int) -> bool:
    """Whether two ranks of a node take memory from one another."""
    mine, theirs = cluster.device_of(rank), cluster.device_of(other)
    return mine.kind == theirs.kind and mine.identity == theirs.identity


def _completed(devices: list[DeviceProfile], batch: int) -> list[DeviceProfile]:
    """Returns the devices; missing layer curves are those of the most complete device, scaled by the step times."""
    reference = max(devices, key=lambda device: (len(device.layers), -device.step.at(batch)))
    completed = []
    for device in devices:
        factor = device.step.at(batch) / reference.step.at(batch)
        missing = {
            form: curves.scaled(factor) for form, curves in reference.layers.items() if form not in device.layers
        }
        completed.append(device.model_copy(update={"layers": {**missing, **device.layers}}))
    return completed


def versions() -> str:
    """Returns the versions that a measurement depends on."""
    return f"torch {torch.__version__}, python {platform.python_version()}, {platform.machine()}"


def _measure_links_of_rank(
    context: GroupContext, cluster: Cluster, device: torch.device, budget_s: float, tell: Callable[[str], None]
) -> list[Link]:
    """Returns the links of pairs whose first rank is this one: inside its node, and from its node to others."""
    links: list[Link] = []
    leaders = [node.ranks[0] for node in cluster.nodes]
    groups = [*(list(node.ranks) for node in cluster.nodes), leaders]
    for ranks in groups:
        if context.rank_group.rank not in ranks or len(ranks) < 2:
            continue
        pairs = list(combinations(ranks, 2))
        if len(pairs) > MOST_PAIRS:
            pairs = [(rank, ranks[(index + 1) % len(ranks)]) for index, rank in enumerate(ranks)]
        enough_s = budget_s / 4 / len(pairs) / 8
        links += measure_links(context, cluster, device, pairs, enough_s=enough_s, tell=tell)
    return links


def fastest_groups(ranks: Sequence[int], steps: Sequence[Curve], batch: int) -> list[list[int]]:
    """Returns the two, three, four, then the 8, 16, ... fastest of some ranks, and all: plans choose such groups."""
    order = sorted(ranks, key=lambda rank: (steps[rank].at(batch), rank))
    counts = {2, 3, 4, *(1 << power for power in range(3, 12)), len(order)}
    return [sorted(order[:count]) for count in sorted(counts) if 1 < count <= len(order)]


def _collectives(
    context: GroupContext,
    cluster: Cluster,
    steps: Sequence[Curve],
    batch: int,
    device: torch.device,
    budget_s: float,
    tell: Callable[[str], None],
) -> list[CollectiveTimings]:
    """Returns the collective timings of the fastest ranks of this rank's node, and of the whole node."""
    ranks = cluster.nodes[cluster.node_of(context.rank_group.rank)].ranks
    if len(ranks) < 2 or len(ranks) > MOST_COLLECTIVE_RANKS:
        return []
    groups = fastest_groups(ranks, steps, batch)
    row_s = min(ROW_S, budget_s / 100)
    return measure_collectives(context, groups, cluster=cluster, device=device, row_s=row_s, tell=tell)


def _unit(device: torch.device, traced: Traced) -> int:
    """Returns the multiple of filters that a device computes best: of tensor cores, or of vectors."""
    size = max((p.dtype.itemsize for p in traced.model.parameters()), default=4)
    if device.type == "cuda":
        return 8 if size < 4 else 4
    vector_bytes = {"AVX2": 32, "AVX512": 64}.get(torch.backends.cpu.get_cpu_capability(), 16)
    return max(1, vector_bytes // size)
