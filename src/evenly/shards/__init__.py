"""Heterogeneous model parallelism: modules whose layers are cut over ranks in unequal shares."""

from evenly.shards.join import example_of, join_shards, shard_model
from evenly.shards.optim.clipping import clip_grad_norm_
from evenly.shards.optim.grad_scaler import GradScaler
from evenly.shards.optim.optimizers import Adafactor, Lamb
from evenly.shards.parts.local_shards import LocalShard, local_shard_of
from evenly.shards.run.sharded import Sharded
from evenly.shards.state.full_state import full_state_dict, load_full_state_dict
from evenly.shards.state.resharding import immovable, moved, reshard
from evenly.shards.verification.comparison import Report, verify
from evenly.shards.verification.drift import DriftMonitor

__all__ = [
    "Adafactor",
    "DriftMonitor",
    "GradScaler",
    "Lamb",
    "LocalShard",
    "Report",
    "Sharded",
    "clip_grad_norm_",
    "example_of",
    "full_state_dict",
    "immovable",
    "join_shards",
    "load_full_state_dict",
    "local_shard_of",
    "moved",
    "reshard",
    "shard_model",
    "verify",
]
