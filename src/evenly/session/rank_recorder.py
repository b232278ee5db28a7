"""Writes what this rank does in every step to `ranks/<rank>.jsonl`: times, exchanges, bytes on the link."""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

from evenly.exchange import ExchangeSummary
from evenly.session.recorder import drop_cut_line
from evenly.session.run_clock import RunClock
from evenly.spec import LinkBytes, RankStarted, StepTimes
from evenly.spec.rank_log import EXCHANGE_LINE, FOLDER, LEAST_PART, LEAST_ROW_S

logger = logging.getLogger(__name__)

FLUSH_S = 1.0  # lines are written at most this often
MOST_BYTES = 16 * 2**20  # a file that earlier starts of the run have made larger is begun anew


class RankTotals(NamedTuple):
    """The sums of one rank since the session began."""

    steps: int
    compute_s: float
    gradients_s: float
    exchange_s: float
    waiting_s: float
    samples: float
    gradient_bytes: int


@dataclass(frozen=True)
class RankIdentity:
    """Which rank writes, and where it runs."""

    rank: int
    node: int
    host: str
    device: str


_Step = tuple[int, float, RankTotals]  # the number of a step, when it ended, the sums then
_Exchange = tuple[float, ExchangeSummary, int, int]  # when the last of several ended, that one, how many, their bytes


class RankRecorder:
    """The record of one rank. Most steps cost it a look at the clock: sums are read when a line is due.

    Lines are made and written once a second: then their code is in the processor's cache.

    A file that cannot be written ends the record, not the run.
    """

    def __init__(
        self,
        folder: Path,
        identity: RankIdentity,
        totals: Callable[[], RankTotals],
        link_bytes: Callable[[], int] | None,
        run_clock: RunClock,
    ) -> None:
        """Writes nothing yet.

        Args:
            folder: the folder of the run.
            identity: the rank.
            totals: returns the sums of this rank so far.
            link_bytes: returns the bytes that this node has sent since the start; None on all but its first rank.
            run_clock: the time of the run.
        """
        self._run_clock = run_clock
        self._file = folder / FOLDER / f"{identity.rank}.jsonl"
        self._identity = identity
        self._totals = totals
        self._link_bytes = link_bytes
        self._stream: TextIO | None = None
        self._is_closed = False
        self._pending: list[_Step | _Exchange] = []  # not yet written
        self._begin(0)

    def begin(self, step: int) -> None:
        """Starts the clock: training begins after `step`. What is recorded from here on is a part of its own."""
        self.flush()
        self._begin(step)

    def _begin(self, step: int) -> None:
        self._step = step
        self._exchange: ExchangeSummary | None = None  # the last one, unless it has its line
        self._exchanges = self._exchanged_bytes = 0  # since the last line of one
        self._exchange_due = self._link_due = 0.0
        self._began = self._row_began = self._flushed_at = self._run_clock.monotonic()
        self._due = self._began + LEAST_ROW_S
        self._before = self._appended = self._totals()
        started = RankStarted(at_s=self._run_clock.time(), step=step, **vars(self._identity))
        self._header: str | None = started.model_dump_json()  # written before the first line of the part

    def step_done(self, step: int) -> None:
        """Records a step, or several since the last line."""
        self._step = step
        now = self._run_clock.monotonic()
        if now < self._due or self._is_closed:
            return
        self._append_steps(now)
        self._due = now + max(LEAST_ROW_S, LEAST_PART * (now - self._began))
        if now - self._flushed_at > FLUSH_S:
            self._flush()

    def exchange_done(self, done: ExchangeSummary) -> None:
        """Records an exchange, or several since the last line of one."""
        if self._is_closed:
            return
        self._exchange = done
        self._exchanges += 1
        self._exchanged_bytes += done.sent_bytes
        now = self._run_clock.monotonic()
        if now >= self._exchange_due:
            self._exchange_due = now + LEAST_PART * (now - self._began)
            self._append_exchanges()

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self.flush()
        self._is_closed = True
        self._close_stream()

    def flush(self) -> None:
        """Writes all that was not due yet: the last steps, and the exchange after them."""
        self._append_exchanges()
        if not self._is_closed and self._totals() != self._appended:
            self._append_steps(self._run_clock.monotonic())
        self._flush()

    def _append_steps(self, now: float) -> None:
        self._appended = self._totals()
        self._pending.append((self._step, now, self._appended))

    def _append_exchanges(self) -> None:
        if self._exchange is not None:
            self._pending.append((self._elapsed_s(), self._exchange, self._exchanges, self._exchanged_bytes))
            self._exchange = None
            self._exchanges = self._exchanged_bytes = 0

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(OSError):  # what could not be written is still in its buffer
                stream.close()

    def _elapsed_s(self) -> float:
        return round(self._run_clock.monotonic() - self._began, 6)

    def _flush(self) -> None:
        self._flushed_at = self._run_clock.monotonic()
        if self._is_closed or not self._pending:
            return
        lines = [self._line_of(entry) for entry in self._pending]
        self._pending = []
        if self._header is not None:
            lines.insert(0, self._header)
            self._header = None
        try:
            lines += self._link_lines()
            self._stream = self._stream or _open(self._file)
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()
        except OSError as error:
            logger.warning("%s cannot be written: %s. The run goes on without it.", self._file, error.strerror or error)
            self._is_closed = True
            self._close_stream()

    def _link_lines(self) -> list[str]:
        now = self._run_clock.monotonic()
        if self._link_bytes is None or now < self._link_due:
            return []
        self._link_due = now + LEAST_PART * (now - self._began)
        return [LinkBytes(at_s=self._elapsed_s(), sent_bytes=self._link_bytes()).model_dump_json()]

    def _line_of(self, entry: _Step | _Exchange) -> str:
        return self._step_line(*entry) if len(entry) == 3 else _exchange_line(*entry)

    def _step_line(self, step: int, now: float, totals: RankTotals) -> str:
        """Returns the line of all steps since the line before."""
        before, self._before = self._before, totals
        began, self._row_began = self._row_began, now
        row = StepTimes(
            step=step,
            steps=totals.steps - before.steps,
            ended_s=now - self._began,
            seconds=now - began,
            compute_s=totals.compute_s - before.compute_s,
            gradients_s=totals.gradients_s - before.gradients_s,
            exchange_s=totals.exchange_s - before.exchange_s,
            waiting_s=totals.waiting_s - before.waiting_s,
            samples=totals.samples - before.samples,
            gradient_bytes=totals.gradient_bytes - before.gradient_bytes,
        )
        return row.to_line()


def _exchange_line(at_s: float, done: ExchangeSummary, count: int, sent_bytes: int) -> str:
    return EXCHANGE_LINE % (
        at_s,
        done.number,
        done.step,
        done.merged,
        done.seconds,
        done.met_s,
        done.waited_s,
        sent_bytes,
        count,
    )


def _open(file: Path) -> TextIO:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_file() and file.stat().st_size > MOST_BYTES:
        file.unlink()
    drop_cut_line(file)
    return file.open("a", encoding="utf-8")
