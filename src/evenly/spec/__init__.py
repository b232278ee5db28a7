"""The nouns. No torch, no clock, no files but JSON text."""

from evenly.spec.cluster import Cluster, Device, Link, Node
from evenly.spec.graph import Graph, Layer, Tensor
from evenly.spec.layout import Layout, deal
from evenly.spec.period import Every, EveryEpoch, EveryGradient, EverySteps, Period, period_of
from evenly.spec.plan import Exchange, Plan, Replica, Role
from evenly.spec.run import (
    CheckpointSaved,
    EpochDone,
    Event,
    ExchangeDone,
    Measured,
    Run,
    RunFailed,
    RunFinished,
    RunStarted,
    StepsDone,
)

__all__ = [
    "CheckpointSaved",
    "Cluster",
    "Device",
    "EpochDone",
    "Event",
    "Every",
    "EveryEpoch",
    "EveryGradient",
    "EverySteps",
    "Exchange",
    "ExchangeDone",
    "Graph",
    "Layer",
    "Layout",
    "Link",
    "Measured",
    "Node",
    "Period",
    "Plan",
    "Replica",
    "Role",
    "Run",
    "RunFailed",
    "RunFinished",
    "RunStarted",
    "StepsDone",
    "Tensor",
    "deal",
    "period_of",
]
