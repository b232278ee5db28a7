"""One pending exchange, from the snapshot to the merge."""

from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

import torch

from evenly.errors import CheckpointError
from evenly.exchange.anchors import TransferStats
from evenly.exchange.background import BackgroundExchange
from evenly.exchange.payload import AgreedState, Payload

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ExchangeSummary:
    """One exchange as a rank saw it.

    It began after `step` and was merged after step `merged`. All ranks had joined after `met_s`, and it took `seconds`
    more; training waited `waited_s` for both. The node's distance to the average was `drift` times the length of the
    parameters.
    """

    number: int
    step: int
    merged: int
    seconds: float
    met_s: float
    waited_s: float
    sent_bytes: int
    weights: tuple[float, ...]
    fragments: tuple[int, ...] = (0,)
    drift: float = 0.0


class PendingState(TypedDict):
    """A completed `PendingExchange` in a checkpoint."""

    number: int
    begun: int
    due: int
    steps: int
    snapshot: Tensors
    is_state_loaded: NotRequired[bool]
    fragments: list[int]
    stateful: list[int]
    pieces: NotRequired[list[AgreedState]]  # in files they belong to the state of the node
    weights: list[float]
    carried: list[float]  # the fields of `TransferStats`
    times: list[float]  # seconds, met_s
    measured: list[float]
    buffers: Tensors


@dataclass
class PendingExchange:
    """One exchange from its snapshot to its merge."""

    number: int
    begun: int  # step after which the snapshot was taken
    due: int  # step after which it is merged
    fragments: tuple[int, ...]
    stateful: tuple[int, ...]  # fragments whose optimizer state is included
    steps: int  # since the previous exchange of these fragments
    label: str  # of its waits, in errors
    payload: Payload
    snapshot: Tensors  # of buffers
    background: "BackgroundExchange[ExchangeOutcome | None] | None" = None
    outcome: "ExchangeOutcome | None" = None
    loaded: set[str] = field(default_factory=set)  # parameters and buffers that were loaded meanwhile
    is_state_loaded: bool = False

    def summary(self, outcome: "ExchangeOutcome", merged: int, waited_s: float) -> ExchangeSummary:
        """Returns the summary of the merged exchange."""
        stats = outcome.carried
        steps, times = (self.number, self.begun, merged), (outcome.seconds, outcome.met_s, waited_s)
        return ExchangeSummary(*steps, *times, stats.sent_bytes, outcome.weights, self.fragments, stats.drift)

    def drop_loaded(self) -> Tensors:
        """Drops the agreed values of tensors that were loaded meanwhile; returns those of buffers."""
        self.payload.drop(self.loaded, state=self.is_state_loaded)
        agreed = {} if self.outcome is None else self.outcome.buffers
        return {name: agreed.pop(name) for name in self.loaded & agreed.keys()}

    def saved(self) -> PendingState:
        """Returns the state of a completed exchange for a checkpoint."""
        outcome = self.outcome
        if outcome is None:
            raise CheckpointError("an exchange that has not completed cannot be saved. Wait until it has.")
        stats = outcome.carried
        return {
            "number": self.number,
            "begun": self.begun,
            "due": self.due,
            "steps": self.steps,
            "snapshot": self.snapshot,
            "is_state_loaded": self.is_state_loaded,
            "fragments": list(self.fragments),
            "stateful": list(self.stateful),
            "pieces": self.payload.saved(),
            "weights": list(outcome.weights),
            "carried": [stats.sent_bytes, stats.squared_distance, stats.squared_norm],
            "times": [outcome.seconds, outcome.met_s],
            "measured": list(outcome.measured),
            "buffers": outcome.buffers,
        }


@dataclass(frozen=True)
class ExchangeOutcome:
    """The result of an exchange."""

    weights: tuple[float, ...]
    carried: TransferStats
    seconds: float  # after all ranks had joined
    met_s: float  # until all ranks had joined
    measured: tuple[float, ...]  # by the slowest rank, before this exchange
    buffers: Tensors = field(default_factory=dict)  # agreed values of the changed ones


def restored(saved: PendingState, payload: Payload, label: str, device: torch.device) -> PendingExchange:
    """Returns the saved exchange, with its agreed values in `payload`."""
    payload.put(saved["pieces"])
    (seconds, met_s), measured = saved["times"], tuple(saved["measured"])
    sent_bytes, squared_distance, squared_norm = saved["carried"]
    stats = TransferStats(int(sent_bytes), squared_distance, squared_norm)
    agreed = _to_device(saved["buffers"], device)
    outcome = ExchangeOutcome(tuple(saved["weights"]), stats, seconds, met_s, measured, agreed)
    return PendingExchange(
        number=saved["number"],
        begun=saved["begun"],
        due=saved["due"],
        fragments=tuple(saved["fragments"]),
        stateful=tuple(saved["stateful"]),
        steps=saved["steps"],
        label=label,
        payload=payload,
        snapshot=_to_device(saved["snapshot"], device),
        outcome=outcome,
        is_state_loaded=saved.get("is_state_loaded", False),
    )


def _to_device(tensors: Tensors, device: torch.device) -> Tensors:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
