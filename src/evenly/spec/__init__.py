"""The nouns. No torch, no clock, no files but JSON text."""

from evenly.spec.cluster import Cluster, Device, Link, Node
from evenly.spec.period import EveryEpoch, EveryGradient, EverySteps, Period, period_of
from evenly.spec.plan import Exchange, Plan, Role

__all__ = [
    "Cluster",
    "Device",
    "EveryEpoch",
    "EveryGradient",
    "EverySteps",
    "Exchange",
    "Link",
    "Node",
    "Period",
    "Plan",
    "Role",
    "period_of",
]
