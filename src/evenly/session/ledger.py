"""Counts what a run does: steps, samples, exchanges, bytes; and tells it."""

import logging
import time
from dataclasses import asdict
from typing import Any

import psutil

from evenly.nodes import Exchanged
from evenly.session.recorder import Recorder
from evenly.spec import ExchangeDone, PeriodChosen, RunFinished, StepsDone

logger = logging.getLogger(__name__)

TELL_S = 1.0  # progress is told at most this often


class Ledger:
    """The sums of one rank since the session began."""

    def __init__(self, recorder: Recorder) -> None:
        self.step = 0
        self.samples = self.exchange_seconds = 0.0
        self.steps_made = self.exchanges = self.sent_bytes = 0
        self._recorder = recorder
        self._began = self._told = time.monotonic()
        self._interfaces_before = interface_bytes()

    def start(self) -> None:
        """Starts the clock: training begins here."""
        self._began = self._told = time.monotonic()
        self._interfaces_before = interface_bytes()

    def count_step(self, step: int, samples: float, *, epoch: int, ranks: int) -> None:
        """Adds a step; tells progress from time to time, taking the other ranks for equal to this one."""
        self.step = step
        self.steps_made += 1
        self.samples += samples
        if time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            self._recorder.tell(StepsDone, epoch=epoch, step=step, samples=int(self.samples * ranks))

    def count_exchange(self, done: Exchanged) -> None:
        """Adds an exchange and tells it."""
        self.exchanges += 1
        self.exchange_seconds += done.seconds
        self.sent_bytes += done.sent_bytes
        self._recorder.tell(ExchangeDone, **asdict(done))

    def tell_period(self, steps: int, why: str) -> None:
        """Tells a new period."""
        logger.info("from step %d on nodes exchange every %d steps: %s", self.step + 1, steps, why)
        self._recorder.tell(PeriodChosen, step=self.step, steps=steps, why=why)

    def sums(self) -> dict[str, float]:
        """Returns what the totals need of each rank."""
        return {
            "samples": self.samples,
            "sent_bytes": self.sent_bytes,
            "interface_bytes": interface_bytes() - self._interfaces_before,
        }

    def tell_totals(self, rows: list[dict[str, Any]], nodes: list[list[int]]) -> None:
        """Tells the end of the run, given the sums of every rank."""
        seconds = time.monotonic() - self._began
        samples = int(sum(row["samples"] for row in rows))
        self._recorder.tell(
            RunFinished,
            seconds=seconds,
            steps=self.steps_made,
            samples=samples,
            samples_per_s=samples / seconds,
            exchanges=self.exchanges,
            exchange_seconds=self.exchange_seconds,
            sent_bytes=int(sum(row["sent_bytes"] for row in rows)),
            interface_bytes=tuple(int(rows[ranks[0]]["interface_bytes"]) for ranks in nodes),
        )


def interface_bytes() -> int:
    """Returns the bytes this machine or network namespace has sent over its interfaces, loopback left out."""
    counters = psutil.net_io_counters(pernic=True)
    return sum(count.bytes_sent for name, count in counters.items() if not name.startswith("lo"))
