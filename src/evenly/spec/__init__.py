"""The nouns. No torch, no clock, no files but JSON text."""

from evenly.spec.cluster import Cluster, Device, Link, Node
from evenly.spec.exchange import Exchange, ExchangeWishes, Outer, misfit
from evenly.spec.forecast import DeviceForecast, Forecast
from evenly.spec.graph import Graph, Layer, Tensor
from evenly.spec.layout import Layout, deal
from evenly.spec.period import Adaptive, AnyPeriod, Every, EveryEpoch, EveryGradient, EverySteps, Period, period_of
from evenly.spec.plan import Plan, Prediction, Replica, Role
from evenly.spec.profile import Curve, CutStep, DeviceProfile, Lane, LayerCurves, Meeting, Profile, Rate, check_speeds
from evenly.spec.run import (
    CheckpointSaved,
    EpochDone,
    Event,
    ExchangeDone,
    Measured,
    PeriodChosen,
    Rebalanced,
    Run,
    RunFailed,
    RunFinished,
    RunStarted,
    StepsDone,
)

__all__ = [
    "Adaptive",
    "AnyPeriod",
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
    "ExchangeWishes",
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
    "Outer",
    "Period",
    "PeriodChosen",
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
    "misfit",
    "period_of",
]
