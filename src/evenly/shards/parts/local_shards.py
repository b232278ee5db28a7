"""Local shards: which part of a full tensor a local tensor is."""

from collections.abc import Iterable

import torch

from evenly.comm import LocalShard, is_retired, local_shard_of, retire, set_local_shard

__all__ = ["LocalShard", "is_retired", "local_shard_of", "local_shards_of", "retire", "set_local_shard"]


def local_shards_of(tensors: Iterable[torch.Tensor]) -> list[LocalShard]:
    """Returns the local shards of the tensors that have one."""
    return [local_shard for tensor in tensors if (local_shard := local_shard_of(tensor)) is not None]
