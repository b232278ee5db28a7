"""What ranks and the coordinator tell each other, as frozen values that come from JSON and become JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from evenly.errors import SpecError

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
Fields: TypeAlias = Mapping[str, JSON]

MOST_FACTS_BYTES = 16384
MOST_DEPTH = 32  # of lists and objects in each other
MOST_TEXT = 1000  # characters of a name or a reason
MOST_RANKS = 4096  # of a node
MOST_VERSION = 2**53


class MalformedError(Exception):
    """A message has not the fields that it should have."""


@dataclass(frozen=True)
class MemberRank:
    """One rank of one start of a node."""

    node: str
    start: str  # random, the same on all ranks of one start of the node
    local_rank: int
    local_size: int

    def __post_init__(self) -> None:
        if not (self.node and self.start and 0 <= self.local_rank < self.local_size <= MOST_RANKS):
            raise SpecError(
                f"local rank {self.local_rank} of {self.local_size} of node {self.node!r}, start {self.start!r}, was "
                "given. Give a node and a start that are not empty, and a local rank below the local size."
            )
        if not (is_name(self.node) and is_name(self.start)):
            raise SpecError(
                f"the node {self.node[:80]!r} with start {self.start[:80]!r} was given. Names have at most 128 "
                "printable characters."
            )

    def to_json(self) -> dict[str, JSON]:
        """Returns the fields as JSON."""
        return {**vars(self)}

    @classmethod
    def from_json(cls, fields: Fields) -> "MemberRank":
        """Returns the rank that `fields` describe; raises `MalformedError`."""
        try:
            return cls(
                node=text_of(fields, "node"),
                start=text_of(fields, "start"),
                local_rank=count_of(fields, "local_rank"),
                local_size=count_of(fields, "local_size"),
            )
        except SpecError as error:
            raise MalformedError(str(error)) from None


@dataclass(frozen=True)
class Proposal:
    """A rank is ready for an exchange, with these parameters and samples."""

    version: int  # commits this node has applied; 0 if its parameters are fresh
    lineage: str  # of the run that the parameters belong to; empty if they are fresh
    step: int
    samples: float  # of this rank, since its last commit
    signature: str  # of names, shapes, dtypes and settings
    is_healthy: bool  # otherwise the parameters are of no use, and the node takes part with weight 0
    ends: bool = False  # this is the last exchange of the run
    facts: Fields = field(default_factory=dict)  # for the other members
    peers: tuple[str, ...] = ()  # nodes of the last round this rank took part in
    has_groups: bool = True  # whether the groups of the generation of its last round are still open
    gives_state: bool = True  # whether it can give its state now; otherwise nodes that need it wait for another round

    def __post_init__(self) -> None:
        is_count = 0 <= self.version < MOST_VERSION and 0 <= self.step < MOST_VERSION
        if not (is_count and math.isfinite(self.samples) and self.samples >= 0):
            raise SpecError(
                f"a proposal with version {self.version}, step {self.step} and {self.samples} samples was made. Give "
                "numbers that are finite and not negative."
            )
        if facts_bytes(self.facts) > MOST_FACTS_BYTES:
            raise SpecError(
                f"a proposal with facts of {facts_bytes(self.facts)} bytes was made; at most {MOST_FACTS_BYTES} bytes "
                "of JSON are passed on. Give fewer facts."
            )

    def to_json(self) -> dict[str, JSON]:
        """Returns the fields as JSON."""
        return {**vars(self), "facts": dict(self.facts), "peers": list(self.peers)}

    @classmethod
    def from_json(cls, fields: Fields) -> "Proposal":
        """Returns the proposal that `fields` describe; raises `MalformedError`."""
        try:
            return cls(
                version=count_of(fields, "version"),
                lineage=text_of(fields, "lineage"),
                step=count_of(fields, "step"),
                samples=number_of(fields, "samples"),
                signature=text_of(fields, "signature"),
                is_healthy=truth_of(fields, "is_healthy"),
                ends=truth_of(fields, "ends"),
                facts=fields_of(fields, "facts"),
                peers=texts_of(fields, "peers"),
                has_groups=truth_of(fields, "has_groups"),
                gives_state=truth_of(fields, "gives_state"),
            )
        except SpecError as error:
            raise MalformedError(str(error)) from None


@dataclass(frozen=True)
class RoundMember:
    """A node that takes part in a round."""

    node: str
    start: str
    local_size: int
    version: int
    samples: float  # of all its ranks; 0 if it needs state
    needs_state: bool  # its parameters do not count, and it receives those of the healer
    is_behind: bool  # it was left out of the last rounds; its parameters and samples count
    ends: bool  # all its ranks say that this is their last exchange
    facts: tuple[Fields, ...]  # by local rank

    def to_json(self) -> dict[str, JSON]:
        """Returns the fields as JSON."""
        return {**vars(self), "facts": [dict(facts) for facts in self.facts]}

    @classmethod
    def from_json(cls, fields: Fields) -> "RoundMember":
        """Returns the member that `fields` describe; raises `MalformedError`."""
        return cls(
            node=text_of(fields, "node"),
            start=text_of(fields, "start"),
            local_size=count_of(fields, "local_size"),
            version=count_of(fields, "version"),
            samples=number_of(fields, "samples"),
            needs_state=truth_of(fields, "needs_state"),
            is_behind=truth_of(fields, "is_behind"),
            ends=truth_of(fields, "ends"),
            facts=objects_of(fields, "facts"),
        )


@dataclass(frozen=True)
class ExchangeRound:
    """An exchange that the members have agreed to make now."""

    id: str  # never used again
    number: int  # the version that it leads to
    lineage: str  # of the parameters that it leads to
    generation: str  # as long as it stays, so do the members, and groups that were opened for it may be used again
    members: tuple[RoundMember, ...]  # by name
    healer: int | None  # index of the member that gives its state to those that need it
    waiting: tuple[str, ...] = ()  # nodes that need state, which members of this round cannot give
    absent: tuple[str, ...] = ()  # nodes that are connected, but are not in this round

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the members."""
        return tuple(member.node for member in self.members)

    def to_json(self) -> dict[str, JSON]:
        """Returns the fields as JSON."""
        members: list[JSON] = [member.to_json() for member in self.members]
        return {**vars(self), "members": members, "waiting": list(self.waiting), "absent": list(self.absent)}

    @classmethod
    def from_json(cls, fields: Fields) -> "ExchangeRound":
        """Returns the round that `fields` describe; raises `MalformedError`."""
        members = tuple(RoundMember.from_json(member) for member in objects_of(fields, "members"))
        healer = None if fields.get("healer") is None else count_of(fields, "healer")
        if healer is not None and healer >= len(members):
            raise MalformedError(f"healer {healer} of {len(members)} members")
        return cls(
            id=text_of(fields, "id"),
            number=count_of(fields, "number"),
            lineage=text_of(fields, "lineage"),
            generation=text_of(fields, "generation"),
            members=members,
            healer=healer,
            waiting=texts_of(fields, "waiting"),
            absent=texts_of(fields, "absent"),
        )


@dataclass(frozen=True)
class Ballot:
    """The vote of a rank at the end of a round."""

    is_ok: bool
    checksum: str = ""
    why: str = ""


@dataclass(frozen=True)
class RoundVerdict:
    """How a round ended."""

    is_committed: bool
    why: str = ""  # empty if it was committed
    lost: tuple[str, ...] = ()  # nodes that were lost in it


def is_name(text: str) -> bool:
    """Whether `text` may be the name of a node, a start or a job."""
    return len(text) <= 128 and text.isprintable()


def facts_bytes(facts: Fields) -> int:
    """Returns the size of facts as JSON; raises `SpecError` for what JSON does not have."""
    if not _is_shallow(facts, MOST_DEPTH):
        raise SpecError(
            f"facts of a proposal with more than {MOST_DEPTH} lists in each other were given. Give simpler ones."
        )
    try:
        return len(json.dumps(dict(facts), allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(
            f"facts of a proposal were given that are not JSON: {error}. Give finite numbers, texts, lists and "
            "dictionaries of them."
        ) from None


def _is_shallow(value: object, depth: int) -> bool:
    if isinstance(value, Mapping):
        return depth > 0 and all(_is_shallow(item, depth - 1) for item in value.values())
    return not isinstance(value, list | tuple) or (depth > 0 and all(_is_shallow(item, depth - 1) for item in value))


def text_of(fields: Fields, name: str) -> str:
    """Returns the text `name` of a message; raises `MalformedError`."""
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise MalformedError(f"{name} is not a text of at most {MOST_TEXT} characters")
    return value


def count_of(fields: Fields, name: str) -> int:
    """Returns the number `name` of a message, which is whole and not negative; raises `MalformedError`."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_VERSION:
        raise MalformedError(f"{name} is not a whole number, or negative")
    return value


def number_of(fields: Fields, name: str) -> float:
    """Returns the number `name` of a message, which is finite; raises `MalformedError`."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise MalformedError(f"{name} is not a finite number")
    return float(value) if abs(value) < 2.0**1000 else math.nan


def truth_of(fields: Fields, name: str) -> bool:
    """Returns the truth value `name` of a message; raises `MalformedError`."""
    value = fields.get(name)
    if not isinstance(value, bool):
        raise MalformedError(f"{name} is neither true nor false")
    return value


def fields_of(fields: Fields, name: str) -> dict[str, JSON]:
    """Returns the object `name` of a message; raises `MalformedError`."""
    value = fields.get(name)
    if not isinstance(value, dict):
        raise MalformedError(f"{name} is not an object")
    return value


def texts_of(fields: Fields, name: str) -> tuple[str, ...]:
    """Returns the texts `name` of a message; raises `MalformedError`."""
    value = fields.get(name)
    if not isinstance(value, list):
        raise MalformedError(f"{name} is not a list")
    texts = tuple(text for text in value if isinstance(text, str) and len(text) <= MOST_TEXT)
    if len(texts) != len(value):
        raise MalformedError(f"{name} has other items than texts of at most {MOST_TEXT} characters")
    return texts


def objects_of(fields: Fields, name: str) -> tuple[dict[str, JSON], ...]:
    """Returns the objects `name` of a message; raises `MalformedError`."""
    value = fields.get(name)
    if not isinstance(value, list):
        raise MalformedError(f"{name} is not a list")
    objects = tuple(item for item in value if isinstance(item, dict))
    if len(objects) != len(value):
        raise MalformedError(f"{name} has other items than objects")
    return objects
