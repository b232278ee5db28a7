"""An exchange under way beside the training."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

import torch

from evenly.comm import CollectiveWaiter, FailureMonitor

T = TypeVar("T")
EXIT_S = 2.0  # that a process may need longer to end because of what is under way


class BackgroundExchange(Generic[T]):
    """Runs `act` on a thread of its own, behind the flight `after`; on a GPU on `stream`.

    Flights of a rank follow each other in the order in which they began, which is the same on all ranks.
    """

    def __init__(
        self,
        act: Callable[[], T],
        *,
        monitor: FailureMonitor,
        stream: torch.cuda.Stream | None = None,
        after: "BackgroundExchange[T] | None" = None,
    ) -> None:
        self._monitor = monitor
        self._stream = stream
        self._after = after
        self._ready = None if stream is None else _mark(torch.cuda.current_stream(stream.device))
        self._done = threading.Event()
        self._landed: torch.cuda.Event | None = None
        self._error: BaseException | None = None
        _flying().add(self)
        threading.Thread(target=self._fly, args=(act,), name="evenly-exchange", daemon=True).start()

    def wait(self, waiter: CollectiveWaiter) -> T:
        """Returns the result; raises what went wrong on any rank."""
        waiter.wait_for(self._done)
        self.check()
        if self._landed is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._landed)
        return self._result

    def ends_within(self, seconds: float) -> bool:
        """Returns whether it has ended, well or not, after at most so many seconds."""
        return self._done.wait(seconds)

    def check(self) -> None:
        """Raises what has gone wrong on this rank."""
        if self._error is not None:
            raise self._error

    def _fly(self, act: Callable[[], T]) -> None:
        try:
            if self._after is not None:
                self._after._done.wait()
                self._after.check()  # ranks may stand at different places of an exchange that failed
                self._after = None
            if self._stream is None or self._ready is None:
                with torch.no_grad():
                    self._result = act()
            else:
                self._fly_on(self._stream, self._ready, act)
        except BaseException as error:
            self._error = error
            self._monitor.report(error)
        finally:
            self._done.set()

    def _fly_on(self, stream: torch.cuda.Stream, ready: torch.cuda.Event, act: Callable[[], T]) -> None:
        with torch.no_grad(), torch.cuda.stream(stream):
            stream.wait_event(ready)
            self._result = act()
            self._landed = _mark(stream)


@cache
def _flying() -> "weakref.WeakSet[BackgroundExchange[Any]]":
    """Returns the flights of this process, which are awaited at its end: torch aborts one that ends with works open."""
    backgrounds: weakref.WeakSet[BackgroundExchange[Any]] = weakref.WeakSet()
    atexit.register(_await_all, backgrounds)
    return backgrounds


def _await_all(backgrounds: "weakref.WeakSet[BackgroundExchange[Any]]") -> None:
    until = time.monotonic() + EXIT_S
    for background in list(backgrounds):
        background.ends_within(max(0.0, until - time.monotonic()))


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation here
    event.record(stream)
    return event
