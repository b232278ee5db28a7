"""All ranks stop after the same step, which they agree on without a collective while they train."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from evenly.comm import FailureMonitor, FailureNote
from evenly.errors import PeerError
from evenly.launch.signals import SAME_SIGNAL_S

HEADROOM = 2  # steps that a rank makes after it has answered and before it must know all answers
POLL_S = 0.02
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class RunInterrupted(SystemExit):
    """Ends the program after a signal: the checkpoint is complete, and a second start resumes from it.

    The exit code is 0 after SIGUSR1, as schedulers send it before a time limit, and 128 + 15 after SIGTERM.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(0 if signal_number == signal.SIGUSR1 else 128 + signal_number)


class StopAgreement:
    """Lets any rank ask all ranks to stop.

    Each rank answers with the step that it is in, from the thread of its failure monitor, so also while it waits for
    another rank. All stop after the largest of these steps plus `HEADROOM`: until all answers are known, no rank makes
    more than `HEADROOM` further steps.

    Args:
        monitor: of the ranks that train.
        ranks: those that make the same steps as this one: all, or those of its node if periods are in seconds.
        timeout_s: how long a rank waits for the answers.
    """

    def __init__(self, monitor: FailureMonitor, *, ranks: Sequence[int], timeout_s: float) -> None:
        self.reason: str | None = None  # why training stops, once it is known
        self.signal_number: int | None = None  # of the signal that asked for it, on any rank
        self._monitor = monitor
        self._rank = monitor.rank_group.rank
        self._ranks = list(ranks)
        self._timeout_s = timeout_s
        self._request: tuple[str, int] | None = None  # reason and signal, until this rank has told the others
        self._step = 0  # steps that this rank has completed
        self._answers: dict[int, int] = {}  # the step that each rank was in
        self._lock = threading.Lock()
        monitor.subscribe("stop", self._hear)

    def request(self, reason: str, *, signal_number: int = 0) -> None:
        """Asks all ranks to stop; they are told at the next call of `is_reached`. A signal handler may call it."""
        if self._request is None and self.reason is None:
            self._request = (reason, signal_number)

    @property
    def is_requested(self) -> bool:
        """Whether some rank has asked to stop, as far as this one knows."""
        return self._request is not None or self.reason is not None

    def is_reached(self, step: int) -> bool:
        """Returns whether training stops after `step`; every rank calls it between its steps."""
        with self._lock:
            self._step = step
        if self._request is not None and self._rank not in self._answers:
            self._answer(*self._request)
        if self._rank not in self._answers:
            return False
        if step >= self._answers[self._rank] + HEADROOM:
            self._wait_for_answers()
        answers = [self._answers.get(rank) for rank in self._ranks]
        steps = [answer for answer in answers if answer is not None]
        return len(steps) == len(answers) and step >= max(steps) + HEADROOM

    def _hear(self, note: FailureNote) -> None:
        """Takes the answer of another rank; runs in the thread of the monitor."""
        self._answers[note.rank] = note.step
        self._answer(note.text, note.begun)

    def _answer(self, reason: str, signal_number: int) -> None:
        with self._lock:
            if self._rank in self._answers:
                return
            self.reason, self.signal_number = reason, signal_number or None
            self._answers[self._rank] = self._step + 1
        self._monitor.post("stop", reason, step=self._answers[self._rank], begun=signal_number)

    def _wait_for_answers(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not all(rank in self._answers for rank in self._ranks):
            self._monitor.poll()
            if time.monotonic() > deadline:
                absent = [rank for rank in self._ranks if rank not in self._answers]
                raise PeerError(
                    f"all ranks were asked to stop ({self.reason}), but ranks {absent} did not answer within "
                    f"{self._timeout_s:g} s ({self._monitor.who(absent)}). Look at their output."
                )
            time.sleep(POLL_S)


@contextmanager
def stopping_on_signals(request: Callable[[int], None]) -> Iterator[None]:
    """Calls `request` with the first SIGTERM or SIGUSR1 inside the block; one much later ends the process as usual.

    Signals that the program handles itself stay with it, and so do those of a loop in another thread than the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    owner, first_s = os.getpid(), float("inf")

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal first_s
        now_s = time.monotonic()
        if os.getpid() != owner or now_s - first_s > SAME_SIGNAL_S:  # workers of a data loader end as usual
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif first_s == float("inf"):
            first_s = now_s
            request(number)

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
