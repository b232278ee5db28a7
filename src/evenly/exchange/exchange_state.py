"""What a checkpoint inside a period keeps of the exchanges of one network."""

from typing import NotRequired, TypedDict

from evenly.exchange.anchors import AnchorState
from evenly.exchange.pending import PendingState
from evenly.schedule.step_counter import ScheduleProgress
from evenly.spec import BufferPolicy


class ExchangeProgress(TypedDict):
    """The sample counts and costs of one rank."""

    samples: list[float]  # since the last snapshot of each fragment
    counts: list[int]  # snapshots of each fragment
    seen: list[float]  # an `ExchangeCosts` without the seconds of a step
    differs: NotRequired[bool]  # whether nodes may hold different parameters


class Progress(ScheduleProgress, ExchangeProgress):
    """The counters of the schedule and of the exchanges."""


class ExchangeState(TypedDict):
    """The anchors and the pending exchanges."""

    settings: dict[str, object]  # those of `Exchange` that must be equal to resume inside a period
    policies: NotRequired[dict[str, BufferPolicy]]
    averaged: NotRequired[list[str]]  # the parameters that exchanges average
    sent: NotRequired[list[str]]  # the parameters that fragments and anchors consist of
    counts: NotRequired[bool]  # whether this rank counts the samples of its replica
    restarts: int  # how often anchors were reset to loaded weights
    points: dict[str, AnchorState]  # the anchors, by the key of the slice
    trips: list[PendingState]  # the pending exchanges
