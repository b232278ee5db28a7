"""Acts that all ranks do together: if one of them fails, all raise the same error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from evenly.errors import CheckpointDamageError, CheckpointError, CheckpointWriteError

T = TypeVar("T")

Gather = Callable[[Any, str], list[Any]]  # of a value, and what the ranks do, to the values of all ranks

ADVICE = (
    "Make room there, or let this program write; with Session(checkpoint_errors='warn') a run goes on without the "
    "checkpoint."
)


def together(gather: Gather, act: Callable[[], T], action: str, path: Path) -> list[T]:
    """Returns every rank's result of `act`; if one rank fails, all raise, naming it."""
    result: T | None = None
    failure = None
    try:
        result = act()
    except Exception as problem:
        failure = _kind(problem).__name__, f"{type(problem).__name__}: {problem}"
    rows = gather((result, failure), action)
    failed = {rank: row for rank, (_, row) in enumerate(rows) if row}
    if failed:
        rank, (_, reason) = next(iter(failed.items()))
        names = {name for name, _ in failed.values()}
        text = f"ranks {list(failed)} could not {action} {path}. Rank {rank} says: {reason}"
        if names == {CheckpointWriteError.__name__}:
            raise CheckpointWriteError(f"{text}. {ADVICE}")
        raise CheckpointDamageError(text) if names == {CheckpointDamageError.__name__} else CheckpointError(text)
    return [cast("T", value) for value, _ in rows]  # without an error there is a result


def _kind(problem: Exception) -> type[CheckpointError]:
    if isinstance(problem, OSError | CheckpointWriteError):
        return CheckpointWriteError
    return CheckpointDamageError if isinstance(problem, CheckpointDamageError) else CheckpointError
