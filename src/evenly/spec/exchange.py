"""Settings of exchanges: overlap, codec, outer optimizer, policies for optimizer state and buffers."""

from fnmatch import fnmatchcase
from math import ceil
from typing import Annotated, Literal, Self, TypedDict

from pydantic import BeforeValidator, Field, model_validator

from evenly.spec._value import Value
from evenly.spec.period import Adaptive, AnyPeriod, EveryEpoch, EveryGradient, EverySeconds

MOST_S = 1e8  # some years; more does not fit into torch's timeouts
StatePolicy = Literal["keep", "average", "reset"]
BufferPolicy = Literal["auto", "average", "max", "min", "first", "keep"]


Setting = bool | int | float | str | tuple[float, ...]
CODED = {"bf16": 0.5, "int8": 0.254, "int4": 0.133}  # sent bytes over those of float32
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
    """How nodes exchange parameters, buffers and optimizer state."""

    overlap: Annotated[int, Field(ge=0, strict=True)] = Field(
        default=0, description="steps made between the snapshot and the merge; 0: training waits for the exchange"
    )
    fragments: Annotated[int, Field(ge=1, strict=True)] = Field(
        default=1, description="parts of the parameters, which are exchanged one after another inside a period"
    )
    codec: str = Field(
        default="fp32", description="format of sent parameters: fp32, or of differences to the anchor: bf16, int8, int4"
    )
    outer: Annotated[Outer | None, BeforeValidator(_outer)] = None
    optimizer_state: StatePolicy | dict[str, StatePolicy] = Field(
        default="keep", description="policy for optimizer state at an exchange, for all or by the name of the state"
    )
    state_every: Annotated[int, Field(ge=1, strict=True)] = Field(
        default=1, description="the state policy applies every N exchanges"
    )
    buffers: BufferPolicy | dict[str, BufferPolicy] = Field(
        default="auto",
        description="policy for buffers at an exchange, for all or by patterns of their names; the first match "
        "holds; auto follows their module and dtype",
    )
    offload: bool = Field(
        default=False,
        description="whether what an exchange needs besides the network is kept and computed in host memory",
    )
    timeout_s: Annotated[float, Field(gt=0, lt=MOST_S)] = 600.0
    nonfinite: Literal["stop", "skip"] = "stop"

    def policy_of(self, slot: str) -> StatePolicy:
        """Returns the policy for the optimizer state of this name."""
        policies = self.optimizer_state
        return policies if isinstance(policies, str) else policies.get(slot, "keep")

    def buffer_policy(self, name: str) -> BufferPolicy:
        """Returns the policy for the buffer of this name: that of the first matching pattern, else auto.

        >>> Exchange(buffers={"*.queue": "first"}).buffer_policy("encoder.queue")
        'first'
        """
        return next((policy for pattern, policy in self.buffer_patterns.items() if fnmatchcase(name, pattern)), "auto")

    @property
    def buffer_patterns(self) -> dict[str, BufferPolicy]:
        """Policies of buffers by patterns of their names."""
        return {"*": self.buffers} if isinstance(self.buffers, str) else self.buffers

    def treats_state(self, policy: StatePolicy) -> bool:
        """Returns whether any optimizer state has this policy."""
        policies = self.optimizer_state
        return policy in ([policies] if isinstance(policies, str) else policies.values())

    @property
    def least_steps(self) -> int:
        """The shortest period that such exchanges fit into."""
        return max(1, self.overlap, self.fragments)

    @property
    def coded_fraction(self) -> float:
        """The sent bytes over those of the parameters; 1 for a codec of the user's."""
        return CODED.get(self.codec, 1.0)

    def device_copies(self, ranks: int) -> float:
        """Returns the copies of every parameter that a device holds for exchanges while it trains.

        `ranks` of a node divide the values that were agreed on, and the errors of a code.

        >>> Exchange().device_copies(2), Exchange(overlap=5, codec="int8").device_copies(2)
        (0.0, 3.5)
        >>> Exchange(overlap=5, codec="int8", offload=True).device_copies(2)
        0.0
        """
        if self.offload:
            return 0.0
        snapshot = 2 / self.fragments if self.overlap else 0.0
        return snapshot + (0.0 if self.codec == "fp32" and self.outer is None else 3 / ranks)

    @property
    def least_adaptive_steps(self) -> int:
        """The shortest period worth choosing: at least twice the overlap, so that merges fall into its first half."""
        return max(self.least_steps, 2 * self.overlap)

    def hidden_steps(self, period: int) -> int:
        """Returns how many of a period's steps may overlap with exchanges."""
        return min(period, self.fragments * self.overlap)

    def affordable_steps(self, *, step_s: float, transfer_s: float, budget: float, slowed_s: float = 0.0) -> int:
        """Returns the steps of a period in which exchanges cost a part `budget` of the time.

        `transfer_s` are the seconds of one exchange, of which a period has one for each fragment. An
        overlapped exchange costs the time beyond its steps, or the `slowed_s` by which it slows them; it must end
        before the next one begins.

        >>> Exchange().affordable_steps(step_s=0.1, transfer_s=0.2, budget=0.1)
        18
        """
        waiting_s = max(0.0, transfer_s - self.overlap * step_s)
        steps = ceil(self.fragments * max(waiting_s, slowed_s) * (1 - budget) / (step_s * budget))
        busy = ceil(self.fragments * transfer_s / step_s) if self.overlap else 0
        return max(self.least_adaptive_steps, steps, busy)

    def with_affordable_start(self, period: Adaptive, *, step_s: float, exchange_s: float) -> Adaptive:
        """Returns the period, starting with the steps that keep its budget; `exchange_s` is the total of a period."""
        if period.exchange_budget is None or not exchange_s:
            return period
        times = {"step_s": step_s, "transfer_s": exchange_s / self.fragments}
        steps = self.affordable_steps(**times, budget=period.exchange_budget)
        return period.model_copy(update={"start": min(period.most, steps)})

    @property
    def is_plain(self) -> bool:
        """Whether training waits for exchanges, and these average float32 parameters."""
        return self.overlap == 0 and self.fragments == 1 and self.codec == "fp32" and self.outer is None


def misfit(period: AnyPeriod, exchange: Exchange) -> str:
    """Returns why these settings do not fit the period; an empty text if they do.

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
        length = "1 step" if period.steps == 1 else f"{period.steps} steps"
        return f"{exchange.fragments} fragments were asked for in a period of {length}; take fewer"
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
    offload: bool
    nonfinite: Literal["stop", "skip"]
