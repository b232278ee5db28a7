"""When nodes exchange: the periods K' can take."""

import re
from math import ceil
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from evenly.errors import SpecError
from evenly.spec._value import Value

BUDGET = 0.02  # of the time, for exchanges
EPOCH_STEPS = 1000  # steps of an epoch in a prediction, where the data are not known
UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600}
WARMUP = Field(default=0, ge=0, strict=True, description="first steps, each followed by an exchange")


class EverySteps(Value):
    """An exchange after every `steps`-th optimizer step (K' = steps), counted from 1.

    >>> EverySteps(50, warmup=100)
    EverySteps(kind='steps', steps=50, warmup=100)
    """

    kind: Literal["steps"] = "steps"
    steps: int = Field(ge=1, strict=True)
    warmup: int = WARMUP
    _positional: ClassVar[tuple[str, ...]] = ("steps",)

    if TYPE_CHECKING:

        def __init__(self, steps: int, *, warmup: int = 0) -> None: ...


class EverySeconds(Value):
    """An exchange whenever so many seconds have passed; each node makes the steps it can until then.

    For nodes of unequal speed: averages are weighted by the samples of each node. It depends on the clock, so runs
    are not reproducible. Nodes wait for each other at exchanges only, and at the end of an epoch.
    """

    kind: Literal["seconds"] = "seconds"
    seconds: float = Field(gt=0)
    warmup: int = WARMUP
    _positional: ClassVar[tuple[str, ...]] = ("seconds",)

    def steps(self, step_s: float) -> int:
        """Returns the steps that a node makes in a period if each takes `step_s`; the last one may end after it."""
        return max(1, ceil(self.seconds / step_s))

    if TYPE_CHECKING:

        def __init__(self, seconds: float, *, warmup: int = 0) -> None: ...


class EveryEpoch(Value):
    """An exchange after every pass over the data, or after every `epochs`-th, counted from 1.

    >>> EveryEpoch(5)
    EveryEpoch(kind='epoch', epochs=5, warmup=0)
    """

    kind: Literal["epoch"] = "epoch"
    epochs: int = Field(default=1, ge=1, strict=True)
    warmup: int = WARMUP
    _positional: ClassVar[tuple[str, ...]] = ("epochs",)

    if TYPE_CHECKING:

        def __init__(self, epochs: int = 1, *, warmup: int = 0) -> None: ...


class EveryGradient(Value):
    """The baseline: all ranks average their gradients at every step, so parameters never differ."""

    kind: Literal["global"] = "global"


class Adaptive(Value):
    """As many steps as meet one goal: exchanges cost a part of the time, or nodes stay close to each other.

    With `exchange_budget=0.02` exchanges cost 2 % of the time; with `drift=0.05` nodes drift
    from their average by 5 % of the norm of the parameters. Steps, links and drift are measured while training.
    """

    kind: Literal["adaptive"] = "adaptive"
    exchange_budget: Annotated[float, Field(ge=1e-6, lt=1)] | None = None
    drift: Annotated[float, Field(gt=0)] | None = None
    start: int = Field(default=4, ge=1, strict=True, description="steps of the first period")
    most: int = Field(default=1000, ge=1, strict=True, description="steps of the longest period")
    warmup: int = WARMUP

    @model_validator(mode="before")
    @classmethod
    def _has_a_goal(cls, fields: dict[str, object]) -> dict[str, object]:
        has_goal = fields.get("exchange_budget") is not None or fields.get("drift") is not None
        return fields if has_goal else {**fields, "exchange_budget": BUDGET}

    @model_validator(mode="after")
    def _has_one_goal(self) -> Self:
        if self.exchange_budget is not None and self.drift is not None:
            raise ValueError("give exchange_budget or drift, not both: each alone decides the period")
        if self.start > self.most:
            raise ValueError(f"the first period of {self.start} steps is longer than the longest, {self.most}")
        return self


AnyPeriod = EverySteps | EverySeconds | EveryEpoch | EveryGradient | Adaptive
Period = Annotated[AnyPeriod, Field(discriminator="kind")]


def known_steps(period: AnyPeriod) -> int:
    """Returns the steps of a period, or of the first of adaptive ones; 0 if the clock decides.

    An epoch counts as `EPOCH_STEPS`.
    """
    match period:
        case EverySteps(steps=number) | Adaptive(start=number):
            return number
        case EveryEpoch(epochs=number):
            return EPOCH_STEPS * number
        case _:
            return 0


Every = AnyPeriod | int | str  # what `period_of` understands


def period_of(wish: Every) -> AnyPeriod:
    """Returns the period that `wish` means.

    A period, a number of steps, `"30s"`, `"5m"`, `"epoch"`, `"5 epochs"`, `"adaptive"`, `"2%"` of the time, `"global"`.

    >>> period_of(8), period_of("5 epochs")
    (EverySteps(kind='steps', steps=8, warmup=0), EveryEpoch(kind='epoch', epochs=5, warmup=0))
    """
    if isinstance(wish, AnyPeriod):
        return wish
    if isinstance(wish, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,300}\s*", wish):
        wish = int(wish)
    if isinstance(wish, str) and (timed := re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*(s|m|min|h)\s*", wish)):
        return EverySeconds(float(timed[1]) * UNITS_S[timed[2]])
    if isinstance(wish, str) and (part := re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*%\s*", wish)):
        return Adaptive(exchange_budget=float(part[1]) / 100)
    if isinstance(wish, str) and (passes := re.fullmatch(r"\s*([0-9]{1,300})\s*epochs?\s*", wish)):
        return EveryEpoch(int(passes[1]))
    if isinstance(wish, int) and not isinstance(wish, bool):
        if wish < 1:
            raise SpecError(
                f"every={wish} was asked for, but nodes exchange after every K' steps with K' at least 1. "
                "Give a positive number, EveryEpoch(), Adaptive(), or 'global'."
            )
        return EverySteps(wish)
    if wish == "epoch":
        return EveryEpoch()
    if wish == "adaptive":
        return Adaptive()
    if wish == "global":
        return EveryGradient()
    raise SpecError(
        f"every={wish!r} is not a period. Give a number of steps, a time such as '30s' or '5m', a part of the time for "
        "exchanges such as '2%', 'epoch', '5 epochs', 'adaptive', 'global', EverySteps(k), EveryEpoch() or "
        "Adaptive(drift=0.05)."
    )
