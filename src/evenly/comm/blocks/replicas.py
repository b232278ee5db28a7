"""Replicas: groups of ranks that hold one copy of the network together, each cut in its own way."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

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
    local_tensor,
)
from evenly.errors import MismatchError, SpecError
from evenly.spec.layout import Segments

Shape = tuple[int, ...]

FLAT = ""  # the name of a flat vector of tensors that every rank holds whole


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
    idle_ranks: tuple[int, ...] = ()  # ranks without a share: they see the batches and hold nothing

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """The ranks that see the batches of this replica."""
        return self.ranks + self.idle_ranks


class _RankCuts(TypedDict):
    """How one rank holds its network, as it tells the others."""

    forms: dict[str, tuple[int | None, Sequence[Segments]]]  # dim and segments of each tensor
    seat: int | None  # the index of the rank in the cuts; None without a share


def shard_group_of(module: torch.nn.Module) -> ShardGroup | None:
    """Returns the group of ranks over which a network is cut; None for a whole one."""
    shard_groups = {
        id(p.shard_group): p.shard_group
        for tensor in named_tensors(module).values()
        if (p := local_shard_of(tensor)) is not None
    }
    if len(shard_groups) > 1:
        raise SpecError(
            f"a model with layers cut over {len(shard_groups)} different groups of ranks was to be synchronized; all "
            "layers must be cut over one group. Shard the whole model at once, or synchronize its parts by themselves."
        )
    return next(iter(shard_groups.values()), None)


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by name, each once; of DTensors this rank's parts."""
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: local_tensor(tensor) for name, tensor in named.items()}


def full_shapes(module: torch.nn.Module) -> dict[str, Shape]:
    """Returns the shape that each parameter and buffer has on one device."""
    return {name: tuple(full_shape(tensor)) for name, tensor in named_tensors(module).items()}


def whole_replicas(nodes: Sequence[Sequence[int]]) -> tuple[tuple[ReplicaRanks, ...], ...]:
    """Returns the replicas of each node where every rank holds the whole network, which is sent as flat vectors."""
    return tuple(tuple(ReplicaRanks((rank,), {FLAT: TensorCut()}) for rank in ranks) for ranks in nodes)


def find_replicas(
    module: torch.nn.Module, groups: Groups, waiter: CollectiveWaiter, *, required: Collection[str]
) -> tuple[tuple[ReplicaRanks, ...], ...]:
    """Returns the replicas of each node; all ranks of the group call it together.

    On ranks that share a network the tensors `required` must have a placement.
    """
    shard_group = shard_group_of(module)
    scope = _announce(shard_group, groups.rank)
    row: _RankCuts = {"forms": _forms(module, shard_group, required), "seat": _cut_index(module, shard_group)}
    rows = gather_json(row, groups.world, waiter)
    members = _members(shard_group, scope, groups.rank)
    replica_ranks = gather_json(members, groups.world, waiter)
    replicas = [_replica(ranks, rows) for rank, ranks in enumerate(replica_ranks) if rank == min(ranks)]
    return tuple(
        tuple(replica for replica in replicas if _lies_in(replica, ranks, groups.nodes)) for ranks in groups.nodes
    )


def _announce(shard_group: ShardGroup | None, rank: int) -> RankGroup | None:
    if shard_group is None:
        return None
    scope = shard_group.monitor.rank_group.scoped("synchronize")
    key = f"rank/{scope.rank}"
    scope.store.set(key, str(rank))
    scope.store.get(key)  # a store answers in order: others see the key from here on, which set() alone does not say
    return scope


def _members(shard_group: ShardGroup | None, scope: RankGroup | None, rank: int) -> list[int]:
    """Returns the ranks of this rank's replica; they have all announced themselves."""
    if shard_group is None or scope is None:
        return [rank]
    keys = [f"rank/{index}" for index in range(scope.size)]
    if not scope.store.check(keys):
        raise SpecError(
            f"the network is cut over {scope.size} ranks, but not all of them were given to synchronize. "
            "Every rank that holds a part must take part: give a group with all of them."
        )
    return [int(scope.store.get(key)) for key in keys]


def _forms(
    module: torch.nn.Module, shard_group: ShardGroup | None, required: Collection[str]
) -> dict[str, tuple[int | None, Sequence[Segments]]]:
    forms: dict[str, tuple[int | None, Sequence[Segments]]] = {}
    for name, tensor in named_tensors(module).items():
        placement = local_shard_of(tensor)
        if shard_group is not None and placement is None and name in required:
            raise SpecError(
                f"{name!r} of a network cut over ranks has no recorded placement: it was put there after the network "
                "was sharded (module.to() makes new buffers). Move and change the network first, then shard it."
            )
        forms[name] = (None, []) if placement is None else (placement.dim, placement.segments)
    return forms


def _cut_index(module: torch.nn.Module, shard_group: ShardGroup | None) -> int | None:
    """Returns the index of this rank in the cuts; None without a share."""
    if shard_group is None:
        return 0
    shards = [local_shard_of(tensor) for tensor in named_tensors(module).values()]
    return None if any(_holds_nothing(p) for p in shards if p is not None) else shard_group.rank


def _holds_nothing(placement: LocalShard) -> bool:
    return placement.dim is not None and placement.shape[placement.dim] > 0 and not any(placement.segments)


def _replica(members: Sequence[int], rows: Sequence[_RankCuts]) -> ReplicaRanks:
    ranks_by_index = {index: rank for rank in members if (index := rows[rank]["seat"]) is not None}
    ranks = tuple(ranks_by_index[index] for index in sorted(ranks_by_index))
    cuts = {json.dumps(rows[rank]["forms"], sort_keys=True): rank for rank in ranks}
    if len(cuts) > 1:
        first, second = list(cuts.values())[:2]
        name = next(n for n, form in rows[first]["forms"].items() if rows[second]["forms"].get(n) != form)
        raise MismatchError(
            f"ranks {first} and {second} hold one network together, but do not agree how {name!r} is cut. "
            "Shard the network on all of its ranks with the same shares."
        )
    forms = {
        name: TensorCut(dim, tuple(tuple((start, stop) for start, stop in part) for part in segments))
        for name, (dim, segments) in rows[ranks[0]]["forms"].items()
    }
    return ReplicaRanks(ranks, forms, tuple(rank for rank in members if rank not in ranks))


def _lies_in(replica: ReplicaRanks, ranks: Sequence[int], nodes: Sequence[Sequence[int]]) -> bool:
    inside = [rank in ranks for rank in replica.all_ranks]
    if any(inside) and not all(inside):
        raise SpecError(
            f"the ranks {sorted(replica.all_ranks)} hold one network together, but are not in one node: the nodes "
            f"are {[list(members) for members in nodes]}. Say by nodes= which ranks form a node."
        )
    return all(inside)
