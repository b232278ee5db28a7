"""What a node tells the other members of a round about its samples."""

import math
from dataclasses import dataclass

from evenly.batches.ranges import Ranges, decoded, encoded
from evenly.coordination.values import JSON, Fields
from evenly.errors import SpecError

ALWAYS = ("epoch", "wants", "rate", "batch")
RARELY = ("size", "dropped")


@dataclass(frozen=True)
class NodeReport:
    """The samples of one node between two commits that it has applied."""

    trained: Ranges = ()  # positions in the order of the epoch
    epoch: int = 0
    wants: int = 0  # samples that it would train in a period
    rate: float = 0.0  # samples per second; 0 if not known
    batch: int = 1  # samples of all its ranks in a step
    size: int | None = None  # the epoch has no more than so many samples; None if it has not met the end
    overlaps: bool = False  # it goes on training during the round, and what it holds stays its own
    dropped: int = 0  # samples it trained without effect, as it took over another node's parameters afterwards
    counts: bool = True  # whether its parameters have a weight in the round

    def __post_init__(self) -> None:
        numbers = (self.epoch, self.wants, self.batch - 1, self.dropped, self.size or 0)
        if not (all(type(number) is int and number >= 0 for number in numbers) and 0 <= self.rate < math.inf):
            raise SpecError(
                f"a report with epoch={self.epoch}, wants={self.wants}, rate={self.rate}, batch={self.batch}, "
                f"dropped={self.dropped} and size={self.size} was given. Give whole numbers and a finite rate, none "
                "negative, and a batch of at least 1."
            )

    def to_json(self) -> dict[str, JSON]:
        """Returns the fields as JSON, without those that the other members know or that have nothing to say."""
        fields: dict[str, JSON] = {
            "trained": [*encoded(self.trained)],
            **{name: getattr(self, name) for name in ALWAYS},
        }
        rare = {"size": self.size, "dropped": self.dropped or None, "overlaps": self.overlaps or None}
        return {**fields, **{name: value for name, value in rare.items() if value is not None}}

    @classmethod
    def from_json(cls, fields: Fields, *, counts: bool = True) -> "NodeReport":
        """Returns the report that `fields` describe; raises `SpecError`."""
        try:
            numbers = {name: fields[name] for name in (*ALWAYS, *(name for name in RARELY if name in fields))}
            for name, value in numbers.items():
                if type(value) is not int and not (name == "rate" and type(value) is float):
                    raise TypeError(f"{name} is {value!r}")
            overlaps = fields.get("overlaps") is True
            return cls(decoded(fields["trained"]), **numbers, overlaps=overlaps, counts=counts)  # type: ignore[arg-type]  # checked above
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(
                f"a report of samples was given that is not one: {type(error).__name__}: {error}. Start all nodes with "
                "the same version of the library."
            ) from None
