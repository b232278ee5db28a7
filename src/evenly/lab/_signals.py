"""Signal handling: a lab that is stopped still cleans up."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGINT,)


@contextmanager
def orderly_end() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into `SystemExit`, as SIGINT already is `KeyboardInterrupt`, so that `finally` runs.

    Handlers of the program are left alone, and outside the main thread nothing can be set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    default_signals = [number for number in _STOPS if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in default_signals:
            signal.signal(number, _leave)
        yield
    finally:
        for number in default_signals:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers SIGINT, SIGTERM and SIGHUP to the end of the block, then raises the last of them.

    Handlers are swapped rather than signals masked: a mask would be inherited by the processes started in the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _STOPS}
    callable_handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in callable_handlers:
            signal.signal(number, lambda number, _frame: pending.append(number))
        yield
    finally:
        for number, handler in callable_handlers.items():
            signal.signal(number, handler)
        if pending:
            signal.raise_signal(pending[-1])


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
