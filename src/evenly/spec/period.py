"""When nodes exchange: the periods K' can take."""

import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from evenly._errors import SpecError
from evenly.spec._value import Value

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


class EveryEpoch(Value):
    """An exchange after every pass over the data."""

    kind: Literal["epoch"] = "epoch"
    warmup: int = WARMUP


class EveryGradient(Value):
    """The baseline: all ranks average their gradients at every step, so parameters never differ."""

    kind: Literal["global"] = "global"


Period = Annotated[EverySteps | EveryEpoch | EveryGradient, Field(discriminator="kind")]

Every = EverySteps | EveryEpoch | EveryGradient | int | str  # what `period_of` understands


def period_of(wish: Every) -> EverySteps | EveryEpoch | EveryGradient:
    """Returns the period that `wish` means: a period, a number of steps, `"epoch"` or `"global"`.

    >>> period_of(8), period_of("epoch")
    (EverySteps(kind='steps', steps=8, warmup=0), EveryEpoch(kind='epoch', warmup=0))
    """
    if isinstance(wish, EverySteps | EveryEpoch | EveryGradient):
        return wish
    if isinstance(wish, str) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", wish):
        wish = int(wish)
    if isinstance(wish, int) and not isinstance(wish, bool):
        if wish < 1:
            raise SpecError(
                f"every={wish} was asked for, but nodes exchange after every K' steps with K' at least 1. "
                "Give a positive number, EveryEpoch(), or 'global'."
            )
        return EverySteps(wish)
    if wish == "epoch":
        return EveryEpoch()
    if wish == "global":
        return EveryGradient()
    raise SpecError(
        f"every={wish!r} is not a period. Give a number of steps, 'epoch', 'global', EverySteps(k) or EveryEpoch()."
    )
