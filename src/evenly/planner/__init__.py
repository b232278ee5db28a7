"""Cluster, profile, graph and wishes -> plan. Pure and deterministic."""

from evenly.planner.balance import balance
from evenly.planner.doubts import doubts
from evenly.planner.layout import lay_out, relaid
from evenly.planner.plan import plan
from evenly.planner.search import Rates
from evenly.planner.simulate import simulate
from evenly.planner.trial import cut_to_try, group_to_try

__all__ = ["Rates", "balance", "cut_to_try", "doubts", "group_to_try", "lay_out", "plan", "relaid", "simulate"]
