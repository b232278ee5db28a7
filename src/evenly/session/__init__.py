"""Composes the rooms below: sessions, checkpoints, and the verbs for a loop written by hand."""

from evenly.session.by_hand import discover, measure, shard, synchronize
from evenly.session.dcp import load_dcp, save_dcp
from evenly.session.session import Session

__all__ = ["Session", "discover", "load_dcp", "measure", "save_dcp", "shard", "synchronize"]
