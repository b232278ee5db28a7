"""The result of one command on the emulated cluster."""

from typing import Annotated, Literal, Self

from pydantic import Field

from evenly.errors import LabError
from evenly.spec._value import Document

Bytes = Annotated[int, Field(ge=0)]


class LabResult(Document):
    """Exit codes by rank, bytes by node, and how long it took.

    An exit code of -N means that the rank was ended by signal N. `stdout` and `stderr` hold one text per rank where the
    command ran with `output="capture"`, and nothing otherwise.
    """

    version: Literal[1] = 1
    exit_codes: tuple[int, ...]
    first_failed: int | None = Field(default=None, description="the rank that failed first, of its own accord")
    timed_out: bool = False
    wall_s: Annotated[float, Field(ge=0)]
    sent_bytes: tuple[Bytes, ...] = Field(description="by node, over its link, during the run")
    received_bytes: tuple[Bytes, ...] = Field(description="by node, over its link, during the run")
    stdout: tuple[str, ...] = ()
    stderr: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every rank ended with exit code 0."""
        return not self.timed_out and not any(self.exit_codes)

    @property
    def exit_code(self) -> int:
        """The exit code of the whole run: 0, 124 after a timeout, else that of the first failed rank."""
        if self.timed_out:
            return 124
        code = 0 if self.first_failed is None else self.exit_codes[self.first_failed]
        return code if code >= 0 else 128 - code

    def check(self) -> Self:
        """Returns this result, or raises `LabError` with the failed rank and its last lines."""
        if self.ok:
            return self
        raise LabError(
            f"the command was to end well on {len(self.exit_codes)} ranks, but {self.blame()}. "
            f"Read what it wrote and correct the command.{self._last_lines()}"
        )

    def blame(self) -> str:
        """Returns what went wrong, in words."""
        if self.timed_out:
            return f"it ran into the timeout after {self.wall_s:.1f} s"
        if self.first_failed is None:
            return "nothing went wrong"
        code = self.exit_codes[self.first_failed]
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"rank {self.first_failed} failed first, with {how}"

    def _last_lines(self) -> str:
        if self.first_failed is None or not self.stderr:
            return ""
        return "\n" + "\n".join(self.stderr[self.first_failed].splitlines()[-20:])
