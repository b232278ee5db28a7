"""Steps as they will be: ranks of a node average gradients of a network, to see what that adds to a step."""

import copy
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.utils import _pytree as pytree

from evenly.comm import Alarm, Party, Waiter, gather_json, open_group
from evenly.graph import Traced
from evenly.nodes import join_nodes
from evenly.spec import Cluster, EverySteps, Exchange, Profile
from evenly.survey import fastest_groups, inputs_of

SAMPLES = 2  # of each rank: little to compute
STEPS = 5


def rehearse(
    party: Party,
    traced: Traced,
    cluster: Cluster,
    profile: Profile,
    device: torch.device,
    *,
    timeout_s: float,
    tell: Callable[[str], None],
) -> Profile:
    """Returns the profile with what averaging gradients adds to the steps of each rank; all ranks call it together.

    The two, three, ... fastest ranks of a node make a few real steps with few samples. What such a step takes more than
    the slowest of them needs alone is what averaging adds there; on a faster rank it adds less.
    """
    node = cluster.nodes[cluster.node_of(party.rank)]
    steps = [device_profile.step for device_profile in profile.devices]
    mine: dict[int, float] = {}
    for ranks in fastest_groups(node.ranks, steps, profile.batch_size) if len(node.ranks) > 1 else []:
        if party.rank not in ranks:
            continue
        tell(f"ranks {ranks} averaging gradients")
        seconds = _joint_step_s(
            party.among(ranks, f"rehearsal {ranks}"), traced, cluster.among(ranks), device, timeout_s
        )
        slowest = max(ranks, key=lambda rank: (steps[rank].at(profile.batch_size), rank))
        mine[slowest] = max(0.0, seconds - profile.ease(slowest, ranks, node.ranks) * steps[slowest].at(SAMPLES))
    alarm = Alarm(party.chapter("rehearsal"))
    try:
        waiter = Waiter(alarm, place="the rehearsal", timeout_s=timeout_s)
        group = open_group(alarm.party, "rehearsal", range(party.size), backend="gloo", timeout_s=timeout_s)
        rows = gather_json({str(rank): seconds for rank, seconds in mine.items()}, group, waiter)
    finally:
        alarm.close()
    found = {int(rank): seconds for row in rows for rank, seconds in row.items()}
    return _completed(profile, cluster, found)


def _completed(profile: Profile, cluster: Cluster, found: dict[int, float]) -> Profile:
    """Returns the profile with what was found; the fastest rank of a node has that of the next, scaled."""
    batch = profile.batch_size
    devices = list(profile.devices)
    for node in cluster.nodes:
        order = sorted(node.ranks, key=lambda rank: (devices[rank].step.at(batch), rank))
        for place, rank in enumerate(order if len(order) > 1 else ()):
            other = order[1] if place == 0 else rank
            factor = devices[rank].step.at(batch) / devices[other].step.at(batch)
            devices[rank] = devices[rank].model_copy(update={"averaging_s": found[other] * factor})
    return profile.model_copy(update={"devices": tuple(devices)})


def _joint_step_s(party: Party, traced: Traced, cluster: Cluster, device: torch.device, timeout_s: float) -> float:
    model = copy.deepcopy(traced.model).to(device).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0, momentum=0.9)
    exchange = Exchange(timeout_s=timeout_s)
    joined = join_nodes(model, optimizer, party=party, cluster=cluster, period=EverySteps(10**9), exchange=exchange)
    given = inputs_of(traced.graph, SAMPLES, device)
    seconds = []
    for _ in range(STEPS + 1):
        began = time.perf_counter()
        outputs = [x for x in pytree.tree_leaves(joined(**given)) if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.stack([x.float().square().mean() for x in outputs]).sum().backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    joined.close()
    return median(seconds[1:])
