"""The ranks that work together, and the store they share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from evenly._torch.process_groups import PrefixStore, default_store
from evenly.errors import LaunchError
from evenly.launch.limits import BoundedStore


@dataclass(frozen=True)
class RankGroup:
    """One rank among `size` ranks that share `store`; nothing here needs torch's default group."""

    rank: int
    size: int
    store: BoundedStore
    serial: int = 0  # a counter of the scopes of this name, this one included
    store_rank: int | None = None  # the rank in whose process the store lives, if it is one of these

    def __post_init__(self) -> None:
        if not isinstance(self.store, BoundedStore):  # a plain store of torch
            object.__setattr__(self, "store", BoundedStore(self.store))

    def scoped(self, name: str) -> "RankGroup":
        """Returns the same ranks with a new prefix of the store; every rank opens its scopes in the same order."""
        serial = self.store.add(f"scopes/{name}/{self.rank}", 1)
        return replace(self, store=self.store.prefixed(f"{name}/{serial}"), serial=serial)

    def among(self, ranks: Sequence[int], name: str) -> "RankGroup":
        """Returns the group of some of the ranks, in this order; only they call it."""
        return RankGroup(list(ranks).index(self.rank), len(ranks), self.store.prefixed(name))


def rank_group_of(group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> RankGroup:
    """Returns the ranks of an open process group; by default of the default group.

    It is an error if the host of the store does not answer for `timeout_s` seconds.
    """
    if not dist.is_initialized():
        raise LaunchError(
            "the ranks of torch's default process group were asked for, but no group is open. "
            "Use evenly.Session(), or call torch.distributed.init_process_group() first."
        )
    process_group = group or dist.group.WORLD
    store = PrefixStore(f"evenly/{getattr(process_group, 'group_name', '')}", default_store())
    if dist.get_rank(group) < 0:
        raise LaunchError(
            f"rank {dist.get_rank()} asked for a process group that it is not a member of. "
            "Only the members of a group call evenly with it."
        )
    ranks = dist.get_process_group_ranks(group)
    store_rank = ranks.index(0) if 0 in ranks else None
    bounded = BoundedStore(store, timeout_s=timeout_s)
    return RankGroup(dist.get_rank(group), dist.get_world_size(group), bounded, store_rank=store_rank)
