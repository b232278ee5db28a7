"""Cluster, profile, graph and wishes -> plan. Pure and deterministic."""

from evenly.planner.layout import lay_out
from evenly.planner.search import Rates

__all__ = ["Rates", "lay_out"]
