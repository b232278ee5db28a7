"""Where a local parameter lies in the full one."""

from collections.abc import Iterable

import torch

from evenly.comm import LocalShard, is_retired, local_shard_of, place, retire

__all__ = ["LocalShard", "is_retired", "local_shard_of", "local_shards_of", "place", "retire"]


def local_shards_of(tensors: Iterable[torch.Tensor]) -> list[LocalShard]:
    """Returns the placements of those tensors that have one."""
    return [found for tensor in tensors if (found := local_shard_of(tensor)) is not None]
