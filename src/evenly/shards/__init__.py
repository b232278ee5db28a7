"""Heterogeneous model parallelism: a module and a layout give a module whose layers are cut over ranks."""

from evenly.shards.clipping import clip_grad_norm_
from evenly.shards.join import example_of, join_shards, shard_model
from evenly.shards.optim import Adafactor, Lamb
from evenly.shards.placement import Placement, placement_of
from evenly.shards.sharded import Sharded

__all__ = [
    "Adafactor",
    "Lamb",
    "Placement",
    "Sharded",
    "clip_grad_norm_",
    "example_of",
    "join_shards",
    "placement_of",
    "shard_model",
]
