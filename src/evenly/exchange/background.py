"""Exchanges that run in background threads during training."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch

from evenly.comm import CollectiveWaiter, FailureMonitor

T_co = TypeVar("T_co", covariant=True)
EXIT_S = 2.0  # how long the end of a process waits for background exchanges


class BackgroundExchange(Generic[T_co]):
    """Runs `act` on its own thread once the exchange `after` is done; on a GPU on `stream`.

    The exchanges of a rank run one after another in the order they began, which is the same on all ranks.
    """

    def __init__(
        self,
        act: Callable[[], T_co],
        *,
        monitor: FailureMonitor,
        stream: torch.cuda.Stream | None = None,
        after: "BackgroundExchange[T_co] | None" = None,
    ) -> None:
        self._monitor = monitor
        self._stream = stream
        self._after = after
        self._ready_event = None if stream is None else _record_event(torch.cuda.current_stream(stream.device))
        self._done = threading.Event()
        self._finished_event: torch.cuda.Event | None = None
        self._error: BaseException | None = None
        _running_exchanges().add(self)
        threading.Thread(target=self._run, args=(act,), name="evenly-exchange", daemon=True).start()

    def wait(self, waiter: CollectiveWaiter) -> T_co:
        """Returns the result; raises the error of any rank."""
        waiter.wait_for(self._done)
        self.check()
        if self._finished_event is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._finished_event)
        return self._result

    def ends_within(self, seconds: float) -> bool:
        """Returns whether it ends, with or without an error, within so many seconds."""
        return self._done.wait(seconds)

    def check(self) -> None:
        """Raises the error of this rank, if there is one."""
        if self._error is not None:
            raise self._error

    def _run(self, act: Callable[[], T_co]) -> None:
        try:
            if self._after is not None:
                self._after._done.wait()
                self._after.check()  # after a failure ranks may be at different collectives
                self._after = None
            if self._stream is None or self._ready_event is None:
                with torch.no_grad():
                    self._result = act()
            else:
                self._run_on_stream(self._stream, self._ready_event, act)
        except BaseException as error:
            self._error = error
            self._monitor.report(error)
        finally:
            self._done.set()

    def _run_on_stream(self, stream: torch.cuda.Stream, ready: torch.cuda.Event, act: Callable[[], T_co]) -> None:
        with torch.no_grad(), torch.cuda.stream(stream):
            stream.wait_event(ready)
            self._result = act()
            self._finished_event = _record_event(stream)


@cache
def _running_exchanges() -> "weakref.WeakSet[BackgroundExchange[object]]":
    """Returns the background exchanges of this process; torch aborts a process that exits with collectives pending."""
    backgrounds: weakref.WeakSet[BackgroundExchange[object]] = weakref.WeakSet()
    atexit.register(_wait_at_exit, backgrounds)
    return backgrounds


def _wait_at_exit(backgrounds: "weakref.WeakSet[BackgroundExchange[object]]") -> None:
    deadline = time.monotonic() + EXIT_S
    for background in list(backgrounds):
        background.ends_within(max(0.0, deadline - time.monotonic()))


def _record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation here
    event.record(stream)
    return event
