"""The nouns. No torch, no clock, no files but JSON text."""

from evenly.spec.cluster import Cluster, Device, Link, Node
from evenly.spec.period import EveryEpoch, EveryGradient, EverySteps, Period, period_of
from evenly.spec.plan import Exchange, Plan, Role
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
    "EveryEpoch",
    "EveryGradient",
    "EverySteps",
    "Exchange",
    "ExchangeDone",
    "Link",
    "Measured",
    "Node",
    "Period",
    "Plan",
    "Role",
    "Run",
    "RunFailed",
    "RunFinished",
    "RunStarted",
    "StepsDone",
    "period_of",
]
