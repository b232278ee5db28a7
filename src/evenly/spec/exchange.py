"""How exchanges are made: how long they may take, in what form they travel, what becomes of the optimizers."""

from fnmatch import fnmatchcase
from math import ceil
from typing import Annotated, Literal, Self, TypedDict

from pydantic import BeforeValidator, Field, model_validator

from evenly.spec._value import Value
from evenly.spec.period import Adaptive, AnyPeriod, EveryEpoch, EveryGradient, EverySeconds

MOST_S = 1e8  # some years; more does not fit into torch's clock
StatePolicy = Literal["keep", "average", "reset"]
BufferPolicy = Literal["auto", "average", "max", "min", "first", "keep"]


Setting = bool | int | float | str | tuple[float, ...]
CODED = {"bf16": 0.5, "int8": 0.254, "int4": 0.133}  # bytes that travel, over those of float32
NESTEROV: dict[str, Setting] = {"lr": 0.7, "momentum": 0.5, "nesterov": True}  # 0.9 where periods are hundreds of steps


class Outer(Value):
    """A torch optimizer that steps over the averaged difference of an exchange; plain averaging is SGD with rate 1.

    Without arguments it is SGD with Nesterov's momentum; with a name and no settings it has those of torch.

    >>> Outer("Adam", settings={"lr": 0.001}).name
    'Adam'
    """

    name: str = Field(default="SGD", description="of a class in torch.optim that treats each element by itself")
    settings: dict[str, Setting] = Field(default_factory=dict)
    _positional = ("name",)

    @model_validator(mode="before")
    @classmethod
    def _is_nesterov(cls, fields: object) -> object:
        return {"settings": NESTEROV} if fields == {} else fields

    @model_validator(mode="after")
    def _has_a_rate(self) -> Self:
        if self.name == "SGD" and not self.settings:
            raise ValueError("SGD outside needs its learning rate, settings={'lr': 1.0} for plain averaging")
        return self


def _outer(wish: object) -> object:
    if isinstance(wish, str | type) and wish != "nesterov":
        raise ValueError("it is 'nesterov', or such as {'name': 'Adam', 'settings': {'lr': 0.001}}, or None")
    return Outer() if wish == "nesterov" else wish


class Exchange(Value):
    """How nodes exchange what they have learned."""

    overlap: Annotated[int, Field(ge=0, strict=True)] = Field(
        default=0, description="steps made between the snapshot and the merge; 0: training waits for the exchange"
    )
    fragments: Annotated[int, Field(ge=1, strict=True)] = Field(
        default=1, description="parts of the parameters, which are exchanged one after another inside a period"
    )
    codec: str = Field(default="fp32", description="form in which parameters travel: fp32, bf16, int8, int4")
    outer: Annotated[Outer | None, BeforeValidator(_outer)] = None
    optimizer_state: StatePolicy | dict[str, StatePolicy] = Field(
        default="keep", description="what becomes of momenta at an exchange, for all or by the name of the state"
    )
    state_every: Annotated[int, Field(ge=1, strict=True)] = Field(
        default=1, description="of so many exchanges one treats the optimizer's state"
    )
    buffers: BufferPolicy | dict[str, BufferPolicy] = Field(
        default="auto",
        description="what becomes of buffers at an exchange, for all or by patterns of their names, of which the first "
        "that fits holds; auto is what their module and type call for",
    )
    timeout_s: Annotated[float, Field(gt=0, lt=MOST_S)] = 600.0
    nonfinite: Literal["stop", "skip"] = "stop"

    def policy_of(self, slot: str) -> StatePolicy:
        """Returns what becomes of the optimizer's state of this name."""
        policies = self.optimizer_state
        return policies if isinstance(policies, str) else policies.get(slot, "keep")

    def buffer_policy(self, name: str) -> BufferPolicy:
        """Returns what becomes of the buffer of this name: what the first pattern that fits says, else auto.

        >>> Exchange(buffers={"*.queue": "first"}).buffer_policy("encoder.queue")
        'first'
        """
        return next((policy for pattern, policy in self.buffer_patterns.items() if fnmatchcase(name, pattern)), "auto")

    @property
    def buffer_patterns(self) -> dict[str, BufferPolicy]:
        """Patterns of the names of buffers, and what becomes of those that fit."""
        return {"*": self.buffers} if isinstance(self.buffers, str) else self.buffers

    def treats_state(self, policy: StatePolicy) -> bool:
        """Returns whether any state of the optimizer is treated so."""
        policies = self.optimizer_state
        return policy in ([policies] if isinstance(policies, str) else policies.values())

    @property
    def least_steps(self) -> int:
        """The shortest period in which such exchanges find their place."""
        return max(1, self.overlap, self.fragments)

    @property
    def coded_part(self) -> float:
        """The bytes that travel, over those of the parameters; a codec of the user's is not known."""
        return CODED.get(self.codec, 1.0)

    @property
    def calm_steps(self) -> int:
        """The shortest period worth choosing: a merge that comes in its second half comes too late to help."""
        return max(self.least_steps, 2 * self.overlap)

    def hidden_steps(self, period: int) -> int:
        """Returns the steps of a period, of so many, beside which exchanges may go on without holding them up."""
        return min(period, self.fragments * self.overlap)

    def affordable_steps(self, *, step_s: float, transfer_s: float, budget: float, slowed_s: float = 0.0) -> int:
        """Returns the steps of a period in which exchanges cost a part `budget` of the time.

        `transfer_s` are the seconds of one exchange, of which a period has one for each fragment. What overlaps with
        steps costs what it takes longer than they do, or the `slowed_s` by which it slows them; the wire must be free
        for the next one.

        >>> Exchange().affordable_steps(step_s=0.1, transfer_s=0.2, budget=0.1)
        18
        """
        waiting_s = max(0.0, transfer_s - self.overlap * step_s)
        steps = ceil(self.fragments * max(waiting_s, slowed_s) * (1 - budget) / (step_s * budget))
        busy = ceil(self.fragments * transfer_s / step_s) if self.overlap else 0
        return max(self.calm_steps, steps, busy)

    def begun(self, period: Adaptive, *, step_s: float, exchange_s: float) -> Adaptive:
        """Returns the period, with the steps that keep its budget as the first; `exchange_s` are all of a period's."""
        if period.exchange_budget is None or not exchange_s:
            return period
        times = {"step_s": step_s, "transfer_s": exchange_s / self.fragments}
        steps = self.affordable_steps(**times, budget=period.exchange_budget)
        return period.model_copy(update={"start": min(period.most, steps)})

    @property
    def is_plain(self) -> bool:
        """Whether training waits for exchanges that carry parameters as they are."""
        return self.overlap == 0 and self.fragments == 1 and self.codec == "fp32" and self.outer is None


def misfit(period: AnyPeriod, exchange: Exchange) -> str:
    """Returns why exchanges cannot be made so in this period; nothing where they can.

    >>> from evenly.spec import EverySteps
    >>> misfit(EverySteps(4), Exchange(overlap=5))
    'exchanges overlap with 5 steps, but a new one begins after 4; let them overlap with fewer'
    """
    if isinstance(period, EveryGradient):
        case = "all gradients are averaged at every step, so nothing is exchanged besides"
        return "" if exchange.is_plain else f"{case}; leave overlap, fragments, codec and outer out, or give a period"
    if isinstance(period, EveryEpoch | EverySeconds) and exchange.fragments > 1:
        return "fragments need a period in steps, not in seconds or of an epoch"
    if isinstance(period, EverySeconds):
        return _misfit_in_time(period, exchange)
    if isinstance(period, EveryEpoch):
        return ""
    if isinstance(period, Adaptive):
        least = exchange.least_steps
        return "" if period.most >= least else f"a period has at most {period.most} steps, and needs {least}"
    if exchange.overlap > period.steps:
        case = f"exchanges overlap with {exchange.overlap} steps, but a new one begins after {period.steps}"
        return f"{case}; let them overlap with fewer"
    if exchange.fragments > period.steps:
        return f"{exchange.fragments} fragments were asked for in a period of {period.steps} steps; take fewer"
    return ""


def _misfit_in_time(period: EverySeconds, exchange: Exchange) -> str:
    if exchange.treats_state("average"):
        return "a node may have made no step, and no optimizer state yet, when nodes exchange; keep or reset it"
    if period.seconds >= exchange.timeout_s:
        case = f"a node may wait {period.seconds:g} s for the others, and gives up after {exchange.timeout_s:g}"
        return f"{case}; give a larger timeout_s, or a shorter period"
    return ""


class ExchangeWishes(TypedDict, total=False):
    """The fields of `Exchange` as arguments."""

    overlap: int
    fragments: int
    codec: str
    outer: Outer | Literal["nesterov"] | dict[str, object] | None
    optimizer_state: StatePolicy | dict[str, StatePolicy]
    state_every: int
    buffers: BufferPolicy | dict[str, BufferPolicy]
    nonfinite: Literal["stop", "skip"]
