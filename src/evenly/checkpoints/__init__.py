"""Full state in global coordinates: folders, merging for another cluster, DCP in and out."""

from evenly.checkpoints.averaged_model import save_average
from evenly.checkpoints.best import KeepBest, KeptCheckpoints
from evenly.checkpoints.dcp import load_dcp, save_dcp
from evenly.checkpoints.export import ExportedWeights, export_weights, load_weights
from evenly.checkpoints.full_state import TrainedModel
from evenly.checkpoints.loading import LoadReport
from evenly.checkpoints.ownership import FolderOwner, hold_together
from evenly.checkpoints.resuming import apply, restore_random_state
from evenly.checkpoints.saving import Checkpoints

__all__ = [
    "Checkpoints",
    "ExportedWeights",
    "FolderOwner",
    "KeepBest",
    "KeptCheckpoints",
    "LoadReport",
    "TrainedModel",
    "apply",
    "export_weights",
    "hold_together",
    "load_dcp",
    "load_weights",
    "restore_random_state",
    "save_average",
    "save_dcp",
]
