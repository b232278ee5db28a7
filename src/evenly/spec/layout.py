"""The placement of every tensor of a network: replicated, sharded along a dim, or partial."""

from collections.abc import Mapping, Sequence, Set
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from evenly.errors import SpecError
from evenly.spec._value import Value
from evenly.spec.graph import Tensor

MoveName = Literal["copy", "reduce", "reduce_scatter", "gather_for_ranks", "gather_for_all", "slice"]
Segments = tuple[tuple[int, int], ...]


class TensorPlacement(NamedTuple):
    """The state of a tensor.

    replicated: every rank has all of it, and all of its gradient.
    copied: every rank has all of it, but of the gradient only the summand that its own work gives.
    sharded: rank r has the indices `cuts[cut].segments[r]` of dim `dim`.
    partial: every rank has a summand; all of the gradient.
    """

    state: Literal["replicated", "copied", "sharded", "partial"]
    dim: int = 0
    cut: int = -1


REPLICATED, COPIED, PARTIAL = TensorPlacement("replicated"), TensorPlacement("copied"), TensorPlacement("partial")


class Cut(Value):
    """How a dim of `size` indices is divided: lists of ranges, one list for each rank.

    A cut of the batch has `rows` > 0, the rows of each sample; it is computed anew for every batch.
    """

    size: int
    segments: tuple[Segments, ...]
    rows: int = 0

    def counts(self) -> list[int]:
        """Returns how many indices each rank has."""
        return [sum(stop - start for start, stop in part) for part in self.segments]


class Choice(Value):
    """What one layer does: its mode, the states it needs and the states it gives."""

    layer: str
    mode: str
    op: str = ""
    where: str = ""
    needs: tuple[TensorPlacement, ...] = ()
    gives: tuple[TensorPlacement, ...] = ()
    messages: int = Field(default=0, description="collectives inside the layer, such as moments of a norm")
    sent_bytes: int = 0
    note: str = ""


class Move(Value):
    """A change of a tensor's state, with the bytes that all ranks together send in one step."""

    tensor: str
    name: MoveName
    before: TensorPlacement
    after: TensorPlacement
    forward_bytes: int = 0
    backward_bytes: int = 0


class Layout(Value):
    """The states of all tensors of one network over the ranks that hold its shards."""

    graph: str = Field(description="fingerprint of the graph it was made for")
    inputs: tuple[Tensor, ...] = Field(default=(), description="what forward took in the example")
    shares: tuple[Annotated[float, Field(ge=0)], ...]
    members: tuple[int, ...] = Field(description="the ranks with a share, in order; others are left out")
    cuts: tuple[Cut, ...] = ()
    choices: tuple[Choice, ...] = ()
    moves: tuple[Move, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for cut in self.cuts:
            covered = sorted(segment for part in cut.segments for segment in part)
            edges = [0, *(stop for _, stop in covered)]
            if [start for start, _ in covered] != edges[:-1] or edges[-1] != cut.size:
                raise ValueError(f"a cut of {cut.size} has the ranges {covered}, which do not cover it exactly once")
            if len(cut.segments) != len(self.members):
                raise ValueError(f"a cut is for {len(cut.segments)} ranks, but {len(self.members)} have a share")
        return self

    @property
    def traffic_bytes(self) -> int:
        """Bytes that all ranks together send in one step, forward and backward."""
        inside = sum(choice.sent_bytes for choice in self.choices)
        return inside + sum(move.forward_bytes + move.backward_bytes for move in self.moves)

    @property
    def messages(self) -> int:
        """Collectives in one step, forward and backward."""
        inside = sum(choice.messages for choice in self.choices)
        return inside + sum((move.forward_bytes > 0) + (move.backward_bytes > 0) for move in self.moves)

    def explain(self) -> str:
        """Returns in plain words the part of each layer on every rank, what is computed whole, and what is sent."""
        share = ", ".join(f"{value:g}" for value in self.shares)
        sent = f"{self.traffic_bytes / 1e6:.3g} MB in {self.messages} {'message' if self.messages == 1 else 'messages'}"
        head = f"shares {share}; {sent} a step (all ranks together)"
        lines = [head]
        left_out = [rank for rank, value in enumerate(self.shares) if value == 0]
        if left_out:
            lines.append(f"left out: ranks {left_out}; they are told the outputs")
        for choice in self.choices:
            if choice.op in ("conv", "linear", "embedding", "attention", "recurrent"):
                lines.append(
                    f"  {choice.where or choice.layer:28} {choice.op:10} {choice.mode:12} {self._counts_text(choice)}"
                )
        notes = [choice for choice in self.choices if choice.note]
        if notes:
            lines.append("computed whole on every rank, behind a gather:")
            lines += [f"  {choice.where or choice.layer:28} {choice.note}" for choice in notes]
        return "\n".join(lines)

    def _counts_text(self, choice: Choice) -> str:
        cut = next((r for r in (*choice.gives, *choice.needs) if r.state == "sharded"), None)
        if cut is None:
            return "whole on every rank"
        counts = dict(zip(self.members, self.cuts[cut.cut].counts(), strict=True))
        rows = self.cuts[cut.cut].rows
        unit = ("samples" if rows == 1 else "rows of the batch") if rows else _unit(choice, cut)
        idle = [rank for rank, count in counts.items() if count == 0]
        none = f"; nothing for ranks {idle}" if idle else ""
        columns = " / ".join(str(counts.get(rank, 0)) for rank in range(len(self.shares)))
        gathers = (
            f"; hidden states are sent at every step, {choice.messages} messages" if choice.mode == "units" else ""
        )
        return f"{columns} of {self.cuts[cut.cut].size} {unit}{none}{gathers}"


def _unit(choice: Choice, cut: TensorPlacement) -> str:
    """Returns the name of the units in which a layer is cut."""
    if choice.op == "attention":
        return "heads"
    if choice.mode == "bystander":
        return f"indices of dim {cut.dim}"
    return {"reduced": "inputs", "columns": "columns", "rows": "rows", "units": "units"}.get(choice.mode, "outputs")


def deal(units: int, shares: Sequence[float]) -> list[int]:
    """Returns whole numbers in proportion to `shares` that sum to `units`, by largest remainder.

    >>> deal(60, [70, 25, 5]), deal(10, [1, 1, 1]), deal(2, [5, 4, 3])
    ([42, 15, 3], [4, 3, 3], [1, 1, 0])
    """
    whole = [Fraction(share) for share in shares]
    total = sum(whole)
    exact = [units * share / total for share in whole]
    counts = [int(value) for value in exact]
    order = sorted(range(len(counts)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in order[: units - sum(counts)]:
        counts[rank] += 1
    return counts


def ranges(counts: list[int]) -> tuple[Segments, ...]:
    """Returns consecutive ranges of these lengths, one list a rank; an empty list for nothing.

    >>> ranges([2, 0, 1])
    (((0, 2),), (), ((2, 3),))
    """
    edges = pairwise(accumulate([0, *counts]))
    return tuple(((start, stop),) if stop > start else () for start, stop in edges)


def numbers_of(values: object, name: str) -> tuple[float, ...]:
    """Returns a list of numbers in order, or raises `SpecError`; text, dicts and sets are not such lists."""
    try:
        if isinstance(values, str | bytes | Mapping | Set):
            raise TypeError
        return tuple(float(number) for number in values)  # type: ignore[attr-defined]  # TypeError if not iterable
    except (TypeError, ValueError, OverflowError):
        raise SpecError(f"{name}={values!r} was given, but a list of numbers is needed, such as [70, 25, 5].") from None


def check_shares(shares: object, *, ranks: int | None = None) -> tuple[float, ...]:
    """Returns the shares as numbers, or raises `SpecError` saying what is wrong with them."""
    numbers = numbers_of(shares, "shares")
    if ranks is not None and len(numbers) != ranks:
        raise SpecError(
            f"{len(numbers)} shares {list(numbers)} were given for {ranks} ranks. Give one share for each rank; "
            "0 leaves a rank out."
        )
    bad = [share for share in numbers if not 0 <= share < float("inf")]
    if bad or not numbers:
        raise SpecError(f"shares={list(numbers)} holds {bad or 'nothing'}. Shares are finite numbers of at least 0.")
    if not any(numbers):
        raise SpecError(f"shares={list(numbers)} leave every rank out. Give at least one rank a share above 0.")
    return numbers
