"""Cluster -> Profile: every rank times the network on its device, all together, and pairs of ranks time their way."""

import platform
from collections.abc import Callable, Sequence
from itertools import combinations

import torch

from evenly.comm import FailureMonitor, GroupContext, RankGroup, backend_for, open_context
from evenly.errors import SpecError
from evenly.graph import Traced
from evenly.spec import Cluster, CollectiveTimings, Curve, DeviceProfile, Link, Profile
from evenly.survey.collective_timings import measure_meetings
from evenly.survey.devices import DeviceSurvey, require_training
from evenly.survey.links import measure_links
from evenly.survey.pooling import pooled

QUICK_S, THOROUGH_S = 4.0, 60.0
MOST_MEETING = 16  # ranks of a node whose meetings are measured
ROW_S = 0.08  # of sums and gathers in a row, if there is time
MOST_PAIRS = 28  # of a node of 8; larger nodes are measured round the ring


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
        rank_group, "measure", place="the measurement of devices", timeout_s=timeout_s, parent=parent
    ) as context:
        node = cluster.nodes[cluster.node_of(rank_group.rank)]
        require_training(traced)
        survey = DeviceSurvey(traced, device, budget_s=budget_s, tell=tell)
        ranks_here = sum(_shares_device(cluster, rank_group.rank, other) for other in node.ranks)
        free_bytes = _usable(survey.free_bytes(ranks_here), memory_bytes)
        context.meet()  # so that all work at the same time
        step = survey.step()
        mine = DeviceProfile(
            rank=rank_group.rank,
            step=step,
            layers=survey.layers(step),
            free_bytes=free_bytes,
            unit=_unit(device, traced),
            spread=survey.spread,
        )
        lanes = _lanes(context, cluster, device, budget_s, tell)
        known = context.gather(mine.model_dump())
        lanes_of_ranks = context.gather([lane.model_dump() for lane in lanes])
        sample_bytes = max(context.gather(survey.sample_bytes()))
        batch = max(1, traced.graph.batch_size)
        devices = _completed(pooled([DeviceProfile(**row) for row in known], cluster, batch), batch)
        steps = [device_profile.step for device_profile in devices]
        meetings = _meetings(context, cluster, steps, batch, device, budget_s, tell)
        meetings_of_ranks = context.gather([meeting.model_dump() for meeting in meetings])
    return Profile(
        cluster=cluster.fingerprint,
        graph=traced.graph.fingerprint,
        batch_size=batch,
        devices=tuple(devices),
        meetings=tuple(CollectiveTimings(**meeting) for row in meetings_of_ranks for meeting in row),
        lanes=tuple(Link(**lane) for row in lanes_of_ranks for lane in row),
        sample_bytes=sample_bytes,
        versions=versions(),
    )


def _usable(free_bytes: int, wish: int | None) -> int:
    """Returns what plans may use of the memory of a rank."""
    if wish is None:
        return free_bytes
    if isinstance(wish, bool) or not isinstance(wish, int) or wish <= 0:
        raise SpecError(
            f"memory_bytes={wish} was given to measure, but it is what this rank may use: one whole number above 0. "
            "Give it in bytes, on each rank its own, or leave it out."
        )
    return min(free_bytes, wish)


def _shares_device(cluster: Cluster, rank: int, other: int) -> bool:
    """Whether two ranks of a node take memory from one another."""
    mine, theirs = cluster.device_of(rank), cluster.device_of(other)
    return mine.kind == theirs.kind and mine.identity == theirs.identity


def _completed(devices: list[DeviceProfile], batch: int) -> list[DeviceProfile]:
    """Returns the devices; what a slow one did not get to is that of a faster one, as much slower as its steps are."""
    model = max(devices, key=lambda device: (len(device.layers), -device.step.at(batch)))
    found = []
    for device in devices:
        factor = device.step.at(batch) / model.step.at(batch)
        missing = {form: own.scaled(factor) for form, own in model.layers.items() if form not in device.layers}
        found.append(device.model_copy(update={"layers": {**missing, **device.layers}}))
    return found


def versions() -> str:
    """Returns what else a measurement depends on."""
    return f"torch {torch.__version__}, python {platform.python_version()}, {platform.machine()}"


def _lanes(
    context: GroupContext, cluster: Cluster, device: torch.device, budget_s: float, tell: Callable[[str], None]
) -> list[Link]:
    """Returns the ways that this rank is the first end of: inside its node, and from its node to others."""
    found: list[Link] = []
    leaders = [node.ranks[0] for node in cluster.nodes]
    rooms = [*(list(node.ranks) for node in cluster.nodes), leaders]
    for ranks in rooms:
        if context.rank_group.rank not in ranks or len(ranks) < 2:
            continue
        backend = backend_for([cluster.device_of(rank) for rank in ranks])
        pairs = list(combinations(ranks, 2))
        if len(pairs) > MOST_PAIRS:
            pairs = [(rank, ranks[(place + 1) % len(ranks)]) for place, rank in enumerate(ranks)]
        enough_s = budget_s / 4 / len(pairs) / 8
        found += measure_links(context, device, pairs, backend=backend, enough_s=enough_s, tell=tell)
    return found


def fastest_groups(ranks: Sequence[int], steps: Sequence[Curve], batch: int) -> list[list[int]]:
    """Returns the two, three, four, then the 8, 16, ... fastest of some ranks, and all: plans choose such groups."""
    order = sorted(ranks, key=lambda rank: (steps[rank].at(batch), rank))
    counts = {2, 3, 4, *(1 << power for power in range(3, 12)), len(order)}
    return [sorted(order[:count]) for count in sorted(counts) if 1 < count <= len(order)]


def _meetings(
    context: GroupContext,
    cluster: Cluster,
    steps: Sequence[Curve],
    batch: int,
    device: torch.device,
    budget_s: float,
    tell: Callable[[str], None],
) -> list[CollectiveTimings]:
    """Returns how the fastest ranks of this rank's node meet, and all of its node."""
    ranks = cluster.nodes[cluster.node_of(context.rank_group.rank)].ranks
    if len(ranks) < 2 or len(ranks) > MOST_MEETING:
        return []
    groups = fastest_groups(ranks, steps, batch)
    backend = backend_for([cluster.device_of(rank) for rank in ranks])
    row_s = min(ROW_S, budget_s / 100)
    return measure_meetings(context, groups, device=device, backend=backend, row_s=row_s, tell=tell)


def _unit(device: torch.device, traced: Traced) -> int:
    """Returns the multiple of filters that a device computes best: of tensor cores, or of vectors."""
    size = max((p.dtype.itemsize for p in traced.model.parameters()), default=4)
    if device.type == "cuda":
        return 8 if size < 4 else 4
    vector_bytes = {"AVX2": 32, "AVX512": 64}.get(torch.backends.cpu.get_cpu_capability(), 16)
    return max(1, vector_bytes // size)
