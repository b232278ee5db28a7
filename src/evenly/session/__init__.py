"""Composes the packages below: sessions, and the verbs for a loop written by hand."""

from evenly.session.by_hand import discover, measure, shard, synchronize
from evenly.session.session import Session

__all__ = ["Session", "discover", "measure", "shard", "synchronize"]
