"""Time limits for calls of torch that may hang, above all of the store.

A client of torch's `TCPStore` waits for ever if the process that hosts it is stopped or cut off, whatever its timeout.
Such calls run in a separate thread, which is abandoned after the limit.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar, Generic, Protocol, TypeVar

from evenly._torch.process_groups import FileStore, HashStore, PrefixStore, Store
from evenly.errors import PeerError
from evenly.launch.settings import environment

Result = TypeVar("Result")

SLICE_S = 0.25
CHECKED_SLICE_S = 0.02  # of a wait that something else may end
IDLE_S = 5.0  # a thread without a call for this long ends
_IN_PROCESS = (HashStore, FileStore)  # no other process has to answer


class NoAnswerError(Exception):
    """A call did not end within its limit; its thread has been abandoned."""


def call_within(limit_s: float, call: Callable[[], Result], *, check: Callable[[], None] | None = None) -> Result:
    """Returns `call()`, or raises `NoAnswerError` after `limit_s` seconds in which this process ran.

    Seconds in which this process was itself stopped do not count: the answer may have come meanwhile. What `check`
    raises, which is called meanwhile, ends the wait, too.
    """
    return _Call(call).wait(limit_s, check=check)


class _PendingCall(Protocol):
    """A call of any result."""

    waited_s: float

    def run(self) -> None:
        """Makes the call."""


class _Worker:
    """A thread that makes one call after another, as long as calls come; one that hangs is not used again."""

    idle: ClassVar[deque["_Worker"]] = deque()

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[_PendingCall] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="bounded-call", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                call = self.calls.get(timeout=IDLE_S)
            except queue.Empty:
                try:
                    self.idle.remove(self)  # from here on it gets no calls
                except ValueError:
                    continue  # a call is about to come
                return
            call.run()
            del call
            self.idle.append(self)


os.register_at_fork(after_in_child=_Worker.idle.clear)  # a child has none of these threads


class _Call(Generic[Result]):
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call, self._done = call, threading.Event()
        self._result: list[Result] = []  # once there is one
        self._error: BaseException | None = None
        self.waited_s = 0.0
        try:
            worker = _Worker.idle.pop()
        except IndexError:
            worker = _Worker()
        worker.calls.put(self)

    def run(self) -> None:
        """Makes the call and wakes its waiter."""
        try:
            self._result = [self._call()]
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self, limit_s: float, *, check: Callable[[], None] | None = None) -> Result:
        slice_s = SLICE_S if check is None else CHECKED_SLICE_S
        while not self._done.wait(min(slice_s, limit_s)):
            self.waited_s += slice_s
            if check is not None:
                check()
            if self.waited_s >= limit_s:
                raise NoAnswerError
        if self._error is not None:
            raise self._error
        return self._result[0]


class _Connection:
    """State shared by all parts of one store: its host, pending calls, and its failure."""

    def __init__(self, store: Store) -> None:
        root = store
        while isinstance(root, PrefixStore):
            root = root.underlying_store
        self.is_remote = root is not None and not isinstance(root, _IN_PROCESS)
        self.address = (  # some kinds of store have none
            f"{root.host}:{root.port}" if hasattr(root, "host") and hasattr(root, "port") else type(root).__name__
        )
        self.of_agent = environment("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.host = "torchrun's agent on the first node" if self.of_agent else "rank 0"
        self.calls: set[_PendingCall] = set()
        self.error: PeerError | None = None  # the store has failed and is not called again
        self.lost_at_s: float | None = None  # when the connection to its host broke


class BoundedStore:
    """Some keys of a store that the ranks share; every call ends within `timeout_s` or raises `PeerError`."""

    def __init__(self, store: Store, *, timeout_s: float = 600.0, connection: _Connection | None = None) -> None:
        self.raw, self.timeout_s = store, timeout_s
        self._connection = connection or _Connection(store)

    def prefixed(self, name: str, *, timeout_s: float | None = None) -> "BoundedStore":
        """Returns the part of the store whose keys begin with `name`."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return BoundedStore(PrefixStore(name, self.raw), timeout_s=limit_s, connection=self._connection)

    def set(self, key: str, value: str) -> None:
        """Writes a value."""
        self.run(lambda: self.raw.set(key, value))

    def get(self, key: str) -> bytes:
        """Returns a value, once it is there."""
        return bytes(self.run(lambda: self.raw.get(key)))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns it."""
        return int(self.run(lambda: self.raw.add(key, amount)))

    def delete(self, key: str) -> None:
        """Removes a key."""
        self.run(lambda: self.raw.delete_key(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are there."""
        return bool(self.run(lambda: self.raw.check(list(keys))))

    def wait(self, keys: Sequence[str]) -> None:
        """Returns when all keys are there."""
        self.run(lambda: self.raw.wait(list(keys)))

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of keys that are all there."""
        return self.run(lambda: read_all(self.raw, keys))

    def run(self, call: Callable[[], Result], *, limit_s: float | None = None) -> Result:
        """Returns the result of `call`, which uses the store, possibly more than once.

        Raises:
            PeerError: the host of the store did not answer within the limit, or the connection to it broke.
        """
        connection = self._connection
        if not connection.is_remote:
            return call()
        if connection.error is not None:
            raise connection.error
        limit_s = self.timeout_s if limit_s is None else limit_s
        pending_call = _Call(call)
        connection.calls.add(pending_call)
        try:
            return pending_call.wait(limit_s)
        except NoAnswerError:
            raise self.fail(self.hung(limit_s)) from None
        except RuntimeError as error:
            connection.lost_at_s = time.monotonic()
            raise self.fail(self.lost(error)) from error
        finally:
            connection.calls.discard(pending_call)

    def fail(self, error: PeerError) -> PeerError:
        """Remembers the first error: from now on every call raises it at once. Returns what all will raise."""
        self._connection.error = self._connection.error or error
        return self._connection.error

    @property
    def is_remote(self) -> bool:
        """Whether another process may have to answer."""
        return self._connection.is_remote

    @property
    def error(self) -> PeerError | None:
        """The error after which the store is not called again."""
        return self._connection.error

    @property
    def lost_s(self) -> float:
        """How long ago the connection to the store broke; 0 if it did not."""
        at_s = self._connection.lost_at_s
        return 0.0 if at_s is None else max(time.monotonic() - at_s, 1e-9)

    @property
    def unanswered_s(self) -> float:
        """How long the longest pending call has waited."""
        with suppress(RuntimeError):  # the set may change meanwhile
            return max((call.waited_s for call in self._connection.calls), default=0.0)
        return 0.0

    def name_host(self, name: str) -> None:
        """Sets the name of rank 0 of the launch; it hosts the store unless torchrun's agent does."""
        if not self._connection.of_agent:
            self._connection.host = name

    def hung(self, waited_s: float) -> PeerError:
        """Returns the error for a store that has not answered."""
        return PeerError(
            f"{self._connection.host}, which hosts the store of the ranks at {self._connection.address}, "
            f"has not answered for {waited_s:.0f} s: it is stopped, overloaded or cut off. Look at that process and "
            "its host; if it only needs longer, give a larger timeout_s."
        )

    def lost(self, error: BaseException) -> PeerError:
        """Returns the error for a store whose connection broke."""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return PeerError(
            f"{self._connection.host}, which hosted the store of the ranks at {self._connection.address}, "
            f"has ended or cannot be reached any more ({reason}). Look at the output of that process."
        )


def read_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Returns the values of keys that are all there, in one message where the store can."""
    if store.has_extended_api():  # type: ignore[attr-defined]  # torch's annotations lack it
        return [bytes(value) for value in store.multi_get(list(keys))]
    return [bytes(store.get(key)) for key in keys]
