"""Who holds what: replicas are groups of ranks that hold one network together, cut in their own way."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evenly.comm import (
    CollectiveWaiter,
    Groups,
    LocalShard,
    RankGroup,
    ShardGroup,
    full_shape,
    gather_json,
    local_shard_of,
)
from evenly.errors import MismatchError, SpecError
from evenly.spec.layout import Segments

Shape = tuple[int, ...]

FLAT = ""  # the name of a vector of tensors that every rank holds whole


@dataclass(frozen=True)
class TensorCut:
    """How a replica holds a tensor: rank r the indices `segments[r]` of `dim`, or every rank all of it (dim None)."""

    dim: int | None = None
    segments: tuple[Segments, ...] = ()


@dataclass(frozen=True)
class ReplicaRanks:
    """The ranks of one network in the order of its cuts, and how they hold each tensor."""

    ranks: tuple[int, ...]
    forms: Mapping[str, TensorCut]
    audience: tuple[int, ...] = ()  # ranks without a share: they see the batches and hold nothing

    @property
    def everybody(self) -> tuple[int, ...]:
        """The ranks that see the batches of this replica."""
        return self.ranks + self.audience


def shard_group_of(module: torch.nn.Module) -> ShardGroup | None:
    """Returns the wire over which a network is cut; None for a whole one."""
    found = {
        id(p.shard_group): p.shard_group
        for tensor in named_tensors(module).values()
        if (p := local_shard_of(tensor)) is not None
    }
    if len(found) > 1:
        raise SpecError(
            f"a model with layers cut over {len(found)} different groups of ranks was to be synchronized; all of its "
            "layers must be cut over one group. Shard the whole model at once, or synchronize its parts by themselves."
        )
    return next(iter(found.values()), None)


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by name, each once."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def full_shapes(module: torch.nn.Module) -> dict[str, Shape]:
    """Returns the shape that each parameter and buffer has on one device."""
    return {name: tuple(full_shape(tensor)) for name, tensor in named_tensors(module).items()}


def whole_replicas(nodes: Sequence[Sequence[int]]) -> tuple[tuple[ReplicaRanks, ...], ...]:
    """Returns the replicas of each node where every rank holds the whole network: all that travels are flat vectors."""
    return tuple(tuple(ReplicaRanks((rank,), {FLAT: TensorCut()}) for rank in ranks) for ranks in nodes)


def find_replicas(
    module: torch.nn.Module, groups: Groups, waiter: CollectiveWaiter
) -> tuple[tuple[ReplicaRanks, ...], ...]:
    """Returns the replicas of each node; all ranks of the party call it together."""
    shard_group = shard_group_of(module)
    room = _announce(shard_group, groups.rank_group.rank)
    rows = gather_json({"forms": _forms(module, shard_group), "seat": _seat(module, shard_group)}, groups.world, waiter)
    members = _members(shard_group, room, groups.rank_group.rank)
    circles = gather_json(members, groups.world, waiter)
    replicas = [_replica(circle, rows) for rank, circle in enumerate(circles) if rank == min(circle)]
    return tuple(
        tuple(replica for replica in replicas if _lies_in(replica, ranks, groups.nodes)) for ranks in groups.nodes
    )


def _announce(shard_group: ShardGroup | None, rank: int) -> RankGroup | None:
    if shard_group is None:
        return None
    room = shard_group.monitor.rank_group.scoped("synchronize")
    room.store.set(f"rank/{room.rank}", str(rank))
    return room


def _members(shard_group: ShardGroup | None, room: RankGroup | None, rank: int) -> list[int]:
    """Returns the ranks of this rank's replica; they have all announced themselves."""
    if shard_group is None or room is None:
        return [rank]
    keys = [f"rank/{place}" for place in range(room.size)]
    if not room.store.check(keys):
        raise SpecError(
            f"the network is cut over {room.size} ranks, but not all of them were given to synchronize. "
            "Every rank that holds a part must take part: give a group with all of them."
        )
    return [int(room.store.get(key)) for key in keys]


def _forms(module: torch.nn.Module, shard_group: ShardGroup | None) -> dict[str, Any]:
    forms: dict[str, Any] = {}
    for name, tensor in named_tensors(module).items():
        placement = local_shard_of(tensor)
        if shard_group is not None and placement is None:
            raise SpecError(
                f"{name!r} of a network cut over ranks does not say where it lies: it was put there after the network "
                "was sharded (module.to() makes new buffers). Move and change the network first, then shard it."
            )
        forms[name] = [None, []] if placement is None else [placement.dim, placement.segments]
    return forms


def _seat(module: torch.nn.Module, shard_group: ShardGroup | None) -> int | None:
    """Returns the place of this rank in the cuts; None without a share."""
    if shard_group is None:
        return 0
    found = [local_shard_of(tensor) for tensor in named_tensors(module).values()]
    return None if any(_holds_nothing(p) for p in found if p is not None) else shard_group.rank


def _holds_nothing(placement: LocalShard) -> bool:
    return placement.dim is not None and placement.shape[placement.dim] > 0 and not any(placement.segments)


def _replica(circle: Sequence[int], rows: Sequence[dict[str, Any]]) -> ReplicaRanks:
    slots = {rows[rank]["seat"]: rank for rank in circle if rows[rank]["seat"] is not None}
    ranks = tuple(slots[place] for place in sorted(slots))
    said = {json.dumps(rows[rank]["forms"], sort_keys=True): rank for rank in ranks}
    if len(said) > 1:
        first, second = list(said.values())[:2]
        name = next(n for n, form in rows[first]["forms"].items() if rows[second]["forms"].get(n) != form)
        raise MismatchError(
            f"ranks {first} and {second} hold one network together, but do not agree how {name!r} is cut. "
            "Shard the network on all of its ranks with the same shares."
        )
    forms = {
        name: TensorCut(dim, tuple(tuple((start, stop) for start, stop in part) for part in segments))
        for name, (dim, segments) in rows[ranks[0]]["forms"].items()
    }
    return ReplicaRanks(ranks, forms, tuple(rank for rank in circle if rank not in ranks))


def _lies_in(replica: ReplicaRanks, ranks: Sequence[int], nodes: Sequence[Sequence[int]]) -> bool:
    inside = [rank in ranks for rank in replica.everybody]
    if any(inside) and not all(inside):
        raise SpecError(
            f"the ranks {sorted(replica.everybody)} hold one network together, but do not stand in one node: the nodes "
            f"are {[list(members) for members in nodes]}. Say by nodes= which ranks form a node."
        )
    return all(inside)
