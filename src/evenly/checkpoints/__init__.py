"""Full state in global coordinates: folders, merging for another cluster, DCP in and out."""

from evenly.checkpoints.dcp import load_dcp, save_dcp
from evenly.checkpoints.full_state import TrainedModel
from evenly.checkpoints.ownership import FolderOwner, hold_together
from evenly.checkpoints.saving import Checkpoints, apply, restore_random_state

__all__ = [
    "Checkpoints",
    "FolderOwner",
    "TrainedModel",
    "apply",
    "hold_together",
    "load_dcp",
    "restore_random_state",
    "save_dcp",
]
