"""Heterogeneous model parallelism: a module and a layout give a module whose layers are cut over ranks."""

from evenly.shards.checking import Report, verify
from evenly.shards.clipping import clip_grad_norm_
from evenly.shards.drift import DriftMonitor
from evenly.shards.join import example_of, join_shards, shard_model
from evenly.shards.moving import immovable, moved, reshard
from evenly.shards.optim import Adafactor, Lamb
from evenly.shards.placement import Placement, placement_of
from evenly.shards.scaling import GradScaler
from evenly.shards.sharded import Sharded
from evenly.shards.state import full_state_dict, load_full_state_dict

__all__ = [
    "Adafactor",
    "DriftMonitor",
    "GradScaler",
    "Lamb",
    "Placement",
    "Report",
    "Sharded",
    "clip_grad_norm_",
    "example_of",
    "full_state_dict",
    "immovable",
    "join_shards",
    "load_full_state_dict",
    "moved",
    "placement_of",
    "reshard",
    "shard_model",
    "verify",
]
