"""The nouns. No torch, no clock, no files but JSON text."""

from evenly.spec.cluster import Cluster, Device, Link, Node
from evenly.spec.forecast import DeviceForecast, Forecast
from evenly.spec.graph import Graph, Layer, Tensor
from evenly.spec.layout import Layout, deal
from evenly.spec.period import Every, EveryEpoch, EveryGradient, EverySteps, Period, period_of
from evenly.spec.plan import Exchange, Plan, Prediction, Replica, Role
from evenly.spec.profile import Curve, CutStep, DeviceProfile, Lane, LayerCurves, Meeting, Profile, Rate, check_speeds
from evenly.spec.run import (
    CheckpointSaved,
    EpochDone,
    Event,
    ExchangeDone,
    Measured,
    Rebalanced,
    Run,
    RunFailed,
    RunFinished,
    RunStarted,
    StepsDone,
)

__all__ = [
    "CheckpointSaved",
    "Cluster",
    "Curve",
    "CutStep",
    "Device",
    "DeviceForecast",
    "DeviceProfile",
    "EpochDone",
    "Event",
    "Every",
    "EveryEpoch",
    "EveryGradient",
    "EverySteps",
    "Exchange",
    "ExchangeDone",
    "Forecast",
    "Graph",
    "Lane",
    "Layer",
    "LayerCurves",
    "Layout",
    "Link",
    "Measured",
    "Meeting",
    "Node",
    "Period",
    "Plan",
    "Prediction",
    "Profile",
    "Rate",
    "Rebalanced",
    "Replica",
    "Role",
    "Run",
    "RunFailed",
    "RunFinished",
    "RunStarted",
    "StepsDone",
    "Tensor",
    "check_speeds",
    "deal",
    "period_of",
]
