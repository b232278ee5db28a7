"""Calls a slow function in a thread of its own, so that training does not wait for it."""

import atexit
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")

MOST_PENDING = 10_000  # items that wait to be sent
IDLE_S = 1.0  # the thread ends this long after the last item; the next item starts another one
CLOSE_S = 5.0  # the end of a run, and that of the program, wait this long


class BackgroundSender(Generic[Item]):
    """Sends items one after the other, in the order in which they were put."""

    def __init__(self, send: Callable[[Item], None], flush: Callable[[], None]) -> None:
        """Starts nothing yet.

        Args:
            send: called with each item, never by two threads at once; it must not raise.
            flush: called when all items were sent and no further one came; it must not raise.
        """
        self._send, self._flush = send, flush
        self._pending: deque[Item] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_sending = self._is_closing = False

    @property
    def is_running(self) -> bool:
        """Whether the thread runs: something is sent, or was a moment ago."""
        return self._thread is not None

    def put(self, item: Item, *, always: bool = False) -> bool:
        """Returns at once, and whether the item will be sent: `always`, or as long as not too many wait."""
        with self._changed:
            if len(self._pending) >= MOST_PENDING and not always:
                return False
            self._pending.append(item)
            self._is_closing = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="evenly-logger", daemon=True)
                self._thread.start()
                atexit.register(self.close)
            self._changed.notify_all()
        return True

    def close(self) -> int:
        """Waits a few seconds until everything is sent; returns how many items are not, which are then dropped."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._thread is None, timeout=CLOSE_S)
            unsent = len(self._pending) + self._is_sending
            self._pending.clear()
        return unsent

    def _run(self) -> None:
        while True:
            self._send_pending()
            self._flush()
            with self._changed:
                if not self._pending:
                    self._thread = None
                    atexit.unregister(self.close)
                    self._changed.notify_all()
                    return

    def _send_pending(self) -> None:
        """Sends items until none has come for a while."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closing, timeout=IDLE_S)
                if not self._pending:
                    return
                item = self._pending.popleft()
                self._is_sending = True
            self._send(item)
            with self._changed:
                self._is_sending = False
