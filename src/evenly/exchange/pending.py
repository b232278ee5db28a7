"""One pending exchange, from the snapshot to the merge, and the background thread that runs it."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, NotRequired, TypedDict, TypeVar

import torch

from evenly.comm import CollectiveWaiter, FailureMonitor, first_line
from evenly.errors import CheckpointError, DeviceMemoryError
from evenly.exchange.anchors import TransferStats
from evenly.exchange.payload import Payload, PayloadEntryState

Tensors = dict[str, torch.Tensor]
T_co = TypeVar("T_co", covariant=True)
EXIT_S = 2.0  # how long the end of a process waits for background exchanges


class BackgroundExchange(Generic[T_co]):
    """Runs `act` on its own thread once the exchange `after` is done; on a GPU on `stream`.

    The exchanges of a rank run one after another in the order they began, which is the same on all ranks.
    """

    def __init__(
        self,
        act: Callable[[], T_co],
        *,
        monitor: FailureMonitor,
        stream: torch.cuda.Stream | None = None,
        after: "BackgroundExchange[T_co] | None" = None,
    ) -> None:
        self._monitor = monitor
        self._stream = stream
        self._after = after
        self._ready_event = None if stream is None else _record_event(torch.cuda.current_stream(stream.device))
        self._done = threading.Event()
        self._finished_event: torch.cuda.Event | None = None
        self._error: BaseException | None = None
        _running_exchanges().add(self)
        threading.Thread(target=self._run, args=(act,), name="evenly-exchange", daemon=True).start()

    def wait(self, waiter: CollectiveWaiter) -> T_co:
        """Returns the result; raises the error of any rank."""
        waiter.wait_for(self._done)
        self.check()
        if self._finished_event is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._finished_event)
        return self._result

    def ends_within(self, seconds: float) -> bool:
        """Returns whether it ends, with or without an error, within so many seconds."""
        return self._done.wait(seconds)

    def check(self) -> None:
        """Raises the error of this rank, if there is one."""
        if self._error is not None:
            raise self._error

    def _run(self, act: Callable[[], T_co]) -> None:
        try:
            if self._after is not None:
                self._after._done.wait()
                self._after.check()  # after a failure ranks may be at different collectives
                self._after = None
            if self._stream is None or self._ready_event is None:
                with torch.no_grad():
                    self._result = act()
            else:
                self._run_on_stream(self._stream, self._ready_event, act)
        except BaseException as problem:
            self._error = told(problem)
            self._monitor.report(self._error)
        finally:
            self._done.set()

    def _run_on_stream(self, stream: torch.cuda.Stream, ready: torch.cuda.Event, act: Callable[[], T_co]) -> None:
        with torch.no_grad(), torch.cuda.stream(stream):
            stream.wait_event(ready)
            self._result = act()
            self._finished_event = _record_event(stream)


def told(error: BaseException) -> BaseException:
    """Returns an error of an exchange as users are told it: one of torch's, for a device without memory, as ours."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    typed = DeviceMemoryError(
        f"an exchange found no memory on its device, and nothing was merged: {first_line(error)} Take smaller batches, "
        "offload=True or several fragments, and go on from the last checkpoint."
    )
    typed.__cause__ = error
    return typed


@cache
def _running_exchanges() -> "weakref.WeakSet[BackgroundExchange[object]]":
    """Returns the background exchanges of this process; torch aborts a process that exits with collectives pending."""
    backgrounds: weakref.WeakSet[BackgroundExchange[object]] = weakref.WeakSet()
    atexit.register(_wait_at_exit, backgrounds)
    return backgrounds


def _wait_at_exit(backgrounds: "weakref.WeakSet[BackgroundExchange[object]]") -> None:
    deadline = time.monotonic() + EXIT_S
    for background in list(backgrounds):
        background.ends_within(max(0.0, deadline - time.monotonic()))


def _record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


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
    begun: int  # its `snapshot_step`
    due: int  # its `merge_step`
    steps: int
    snapshot: Tensors
    is_state_loaded: NotRequired[bool]
    fragments: list[int]
    stateful: list[int]
    pieces: NotRequired[list[PayloadEntryState]]  # in files they belong to the state of the node
    weights: list[float]
    carried: list[float]  # the fields of `TransferStats`
    times: list[float]  # seconds, met_s
    measured: list[float]
    buffers: Tensors


@dataclass
class PendingExchange:
    """One exchange from its snapshot to its merge."""

    number: int
    snapshot_step: int  # the step after which the snapshot was taken
    merge_step: int  # the step after which it is merged
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
    samples: float = 0.0  # of this rank since that exchange

    def summary(self, outcome: "ExchangeOutcome", merged: int, waited_s: float) -> ExchangeSummary:
        """Returns the summary of the merged exchange."""
        stats = outcome.carried
        steps, times = (self.number, self.snapshot_step, merged), (outcome.seconds, outcome.met_s, waited_s)
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
            "begun": self.snapshot_step,
            "due": self.merge_step,
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
    (seconds, met_s), measured = saved["times"], tuple(saved["measured"])
    sent_bytes, squared_distance, squared_norm = saved["carried"]
    stats = TransferStats(int(sent_bytes), squared_distance, squared_norm)
    agreed = _to_device(saved["buffers"], device)
    outcome = ExchangeOutcome(tuple(saved["weights"]), stats, seconds, met_s, measured, agreed)
    return PendingExchange(
        number=saved["number"],
        snapshot_step=saved["begun"],
        merge_step=saved["due"],
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
