"""The world -> Cluster: ranks gather each other's identity and device; nodes are built from these."""

import os

import psutil
import torch

from evenly.comm import FailureMonitor, RankGroup, open_context
from evenly.launch import Identity
from evenly.spec import Cluster, Device, Node


def survey_cluster(
    rank_group: RankGroup,
    identity: Identity,
    device: torch.device,
    *,
    timeout_s: float = 600.0,
    parent: FailureMonitor | None = None,
) -> Cluster:
    """Returns the cluster that the ranks of `rank_group` form; every rank calls it with its own identity and device.

    Ranks are on one node if hostname, boot id, network namespace and the launcher's node id are all the same.
    """
    with open_context(
        rank_group, "survey", label="the survey of the cluster", timeout_s=timeout_s, parent=parent
    ) as context:
        rows = context.gather({"identity": identity.model_dump(), "device": describe_device(device).model_dump()})
    return _build([(Identity(**row["identity"]), Device(**row["device"])) for row in rows])


def describe_device(device: torch.device) -> Device:
    """Returns kind, name and memory of a torch device on this machine."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        properties = torch.cuda.get_device_properties(index)
        return Device(
            kind="cuda",
            index=index,
            name=properties.name,
            identity=str(properties.uuid),
            memory_bytes=properties.total_memory,
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    return Device(kind="cpu", memory_bytes=psutil.virtual_memory().total, cores=cores)


def _build(ranks: list[tuple[Identity, Device]]) -> Cluster:
    ranks_by_node: dict[tuple[str, str, int, str], list[int]] = {}
    for rank, (identity, _) in enumerate(ranks):
        key = (identity.hostname, identity.boot_id, identity.netns, identity.node_id)
        ranks_by_node.setdefault(key, []).append(rank)
    names = [key[0] for key in ranks_by_node]
    nodes = [
        Node(
            name=name if names.count(name) == 1 else f"{name}#{names[:index].count(name) + 1}",
            ranks=tuple(members),
            devices=tuple(ranks[rank][1] for rank in members),
        )
        for index, (name, members) in enumerate(zip(names, ranks_by_node.values(), strict=True))
    ]
    return Cluster(nodes=tuple(nodes))
