"""The typed events of a run, one JSON object a line in `run.jsonl`."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from evenly.errors import SpecError
from evenly.spec._text import long_number
from evenly.spec._value import Document, Value
from evenly.spec.cluster import Cluster
from evenly.spec.plan import Plan


class RunStarted(Value):
    """The first event: who takes part, and what is planned."""

    event: Literal["started"] = "started"
    at_s: float
    version: Literal[1] = 1
    name: str
    cluster: Cluster
    plan: Plan | None = None
    settings: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    resumed_step: int = 0
    ranks: tuple[int, ...] = Field(default=(), description="of those started, if some were left out; here from 0 on")
    left_out: dict[int, str] = Field(default_factory=dict, description="of those started, and why")


class StepsDone(Value):
    """Progress: steps and samples so far on all ranks."""

    event: Literal["steps"] = "steps"
    at_s: float
    epoch: int
    step: int
    samples: int


class ExchangeDone(Value):
    """One exchange across nodes as rank 0 saw it: begun after `step`, merged after `merged`.

    All ranks had joined after `met_s`, and it took `seconds` more; training waited for `waited_s`. `drift` is the
    distance of the node from the average of all, over the norm of the parameters.
    """

    event: Literal["exchange"] = "exchange"
    at_s: float
    number: int
    step: int
    seconds: float
    sent_bytes: int
    weights: tuple[float, ...]
    merged: int = 0
    met_s: float = 0.0
    waited_s: float = 0.0
    fragments: tuple[int, ...] = (0,)
    drift: float = 0.0


class PeriodChosen(Value):
    """From here on nodes exchange every so many steps, and why."""

    event: Literal["period"] = "period"
    at_s: float
    step: int
    steps: int
    why: str


class Rebalanced(Value):
    """Work was redistributed: the samples of each rank or network, and the shares of the ranks of cut networks."""

    event: Literal["rebalanced"] = "rebalanced"
    at_s: float
    step: int
    samples: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...] = ()


class EpochDone(Value):
    """A pass over the data ended."""

    event: Literal["epoch"] = "epoch"
    at_s: float
    epoch: int
    step: int


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Measured(Value):
    """Numbers that the training program reported: losses, accuracies. NaN and infinity become None."""

    event: Literal["measured"] = "measured"
    at_s: float
    step: int
    values: dict[str, Annotated[float | None, BeforeValidator(_finite)]]


class CheckpointSaved(Value):
    """A checkpoint is complete on disk."""

    event: Literal["checkpoint"] = "checkpoint"
    at_s: float
    step: int
    path: str
    seconds: float
    held_s: float | None = Field(default=None, description="seconds of these in which training waited")


class CheckpointFailed(Value):
    """A checkpoint could not be written, and the run went on without it."""

    event: Literal["checkpoint_failed"] = "checkpoint_failed"
    at_s: float
    step: int
    error: str


class Straggler(Value):
    """A rank computes longer than the others of its node, or no longer does (`is_over`).

    `factor` is its computing time per step over the median of the others, in the last seconds before `step`; since
    `since_step` it has been too long.
    """

    event: Literal["straggler"] = "straggler"
    at_s: float
    step: int
    rank: int
    host: str = ""
    factor: float
    since_step: int
    is_over: bool = False
    compared_with: Literal["node", "devices"] = Field(
        default="node", description="the other ranks of its node, or, if it has none, ranks with such a device"
    )

    def explain(self) -> str:
        """Returns what happened, as a sentence without its full stop."""
        others = "its node" if self.compared_with == "node" else "ranks with such a device"
        where = f"rank {self.rank}{f' on host {self.host}' if self.host else ''}"
        if self.is_over:
            return f"{where} is as fast as {others} again since step {self.step}: {self.factor:.1f}x the median"
        return f"{where} takes {self.factor:.1f}x the median of {others} since step {self.since_step}"


class RunStopped(Value):
    """The run was stopped before its last epoch: by the program, or by a signal, after which it can be resumed."""

    event: Literal["stopped"] = "stopped"
    at_s: float
    epoch: int
    step: int
    reason: str


class RunFailed(Value):
    """The run ended in an error."""

    event: Literal["failed"] = "failed"
    at_s: float
    step: int
    error: str


class Quartiles(Value):
    """The times of many steps: half of them are between the outer two."""

    lower_s: float
    median_s: float
    upper_s: float

    @classmethod
    def of(cls, times_s: Sequence[float]) -> Self | None:
        """Returns the quartiles of some times; None without any.

        >>> Quartiles.of([1.0, 2.0, 3.0, 4.0, 50.0])
        Quartiles(lower_s=2.0, median_s=3.0, upper_s=4.0)
        """
        if not times_s:
            return None
        several_s = times_s if len(times_s) > 1 else [*times_s, *times_s]
        lower_s, median_s, upper_s = quantiles(several_s, n=4, method="inclusive")
        return cls(lower_s=lower_s, median_s=median_s, upper_s=upper_s)


class Phases(Value):
    """Where the seconds of a rank went, and the bytes that it sent.

    It computed; averaged gradients, inside its node or with all ranks; was blocked by exchanges across nodes; waited
    for slower ranks; and did other things: data, the optimizer's step, evaluation.
    """

    rank: int
    node: int
    compute_s: float
    gradients_s: float
    exchange_s: float
    waiting_s: float
    other_s: float
    gradient_bytes: int
    exchange_bytes: int
    step: Quartiles | None = Field(default=None, description="one step of the program's loop, exchanges left out")
    computing: Quartiles | None = Field(default=None, description="of one step")


class RunFinished(Value):
    """Totals over all ranks. Sent bytes are counted by the library and, per node, read at the network interfaces.

    `exchange_seconds` counts all exchanges, overlapped with training or not.
    """

    event: Literal["finished"] = "finished"
    at_s: float
    seconds: float
    steps: int
    samples: int
    samples_per_s: float
    exchanges: int
    exchange_seconds: float
    sent_bytes: int
    interface_bytes: tuple[int, ...]
    phases: tuple[Phases, ...] = ()


Event = Annotated[
    RunStarted
    | StepsDone
    | ExchangeDone
    | PeriodChosen
    | Rebalanced
    | EpochDone
    | Measured
    | CheckpointSaved
    | CheckpointFailed
    | Straggler
    | RunStopped
    | RunFailed
    | RunFinished,
    Field(discriminator="event"),
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)
E = TypeVar("E", bound=Value)


class Run(Document):
    """The events of one run, in order."""

    version: Literal[1] = 1
    events: tuple[Event, ...]

    @classmethod
    def from_lines(cls, lines: Iterable[str | bytes]) -> Self:
        """Returns the run with the events in `lines`; a last line cut short by a crash is left out."""
        rows = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        events: list[Event] = []
        for number, line in rows:
            if (long := long_number(line)) is not None:
                raise SpecError(
                    f"line {number} of the run is not an event: it holds the number {long}. "
                    "The file was written by another version or edited."
                )
            try:
                events.append(_EVENT.validate_json(line))
            except ValidationError as error:
                detail = error.errors()[0]
                begun = line[:1] in ("{", b"{")  # a line that was cut short has begun
                if begun and number == rows[-1][0] and detail["type"] == "json_invalid":
                    break
                path = ".".join(str(part) for part in detail["loc"])
                raise SpecError(
                    f"line {number} of the run is not an event: {path} {detail['msg']}. "
                    "The file was written by another version or edited."
                ) from None
        return cls(events=tuple(events))

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Returns the run in the folder or `run.jsonl` file `path`."""
        file = Path(path)
        try:
            file = file / "run.jsonl" if file.is_dir() else file
            return cls.from_lines(file.read_bytes().split(b"\n"))
        except OSError as error:
            raise SpecError(f"cannot read a run from {file}: {error.strerror}. Give a run folder.") from None
        except SpecError as error:
            raise SpecError(f"{file}: {error}") from None

    def of(self, kind: type[E]) -> list[E]:
        """Returns the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def last(self, kind: type[E]) -> E | None:
        """Returns the last event of one kind, or None."""
        events = self.of(kind)
        return events[-1] if events else None

    def latest_values(self) -> dict[str, float | None]:
        """Returns the last reported value under each name."""
        return {name: value for event in self.of(Measured) for name, value in event.values.items()}
