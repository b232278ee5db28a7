"""The base of all loggers: begins with the first event, ends with the run."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from evenly.errors import SpecError
from evenly.integrations.loggers import sender
from evenly.integrations.loggers.sender import BackgroundSender
from evenly.integrations.loggers.values import EventValues
from evenly.spec import Event, RunFailed, RunFinished, RunStarted

logger = logging.getLogger(__name__)

Settings = Mapping[str, str | int | float | bool | None]


LOAD_S = 60.0  # the end of a run waits this long for the import of a client

_Values = tuple[Event, int, dict[str, float]]  # an event, its step, its numbers


class EventLogger(ABC):
    """A listener that sends the numbers of events elsewhere, in a thread of its own.

    It can be made on every rank: nothing is opened before the first event, and only rank 0 gets events. If the tool
    fails or does not answer, one warning says so, and the run goes on without it.
    """

    def __init__(self) -> None:
        self._values = EventValues()
        self._sender = BackgroundSender(self._send, self._flush)
        self._loaded = threading.Event()
        self._is_open = self._has_failed = self._has_dropped = False

    @property
    def is_sending(self) -> bool:
        """Whether the thread that sends events runs."""
        return self._sender.is_running

    def __call__(self, event: Event) -> None:
        """Sends one event later; that of the end of the run waits a few seconds for all."""
        if self._has_failed:
            return
        is_last = isinstance(event, RunFinished | RunFailed)
        if not self._sender.put((event, *self._values(event)), always=is_last) and not self._has_dropped:
            self._has_dropped = True
            logger.warning(
                "%s is too slow: %d events wait to be sent. Events are dropped until there is room again.",
                type(self).__name__,
                sender.MOST_PENDING,
            )
        if is_last:
            self._close()

    def _close(self) -> None:
        self._loaded.wait(LOAD_S)
        unsent = self._sender.close()
        if unsent and not self._has_failed:
            self._has_failed = True
            logger.warning(
                "%s has not sent %d events %g s after the end of the run, and drops them: the tool does not answer, "
                "or is too slow.",
                type(self).__name__,
                unsent,
                sender.CLOSE_S,
            )

    def _send(self, values: _Values) -> None:
        """Runs in the thread."""
        if not self._has_failed:
            self._try(lambda: self._write(*values))
        if self._has_failed and self._is_open:
            self._is_open = False
            try:
                self.end(has_failed=True)
            except Exception as error:  # a tool that has failed already
                logger.debug("%s cannot be closed: %s", type(self).__name__, error)

    def _flush(self) -> None:
        """Runs in the thread."""
        if self._is_open and not self._has_failed:
            self._try(self.flush)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever the tool raises must not end the training
            if not self._has_failed:  # the end of the run has told it, and waits no longer
                logger.warning(
                    "%s cannot log any more: %s: %s. The run goes on without it.",
                    type(self).__name__,
                    type(error).__name__,
                    " ".join(str(error).split()),
                )
                self._has_failed = True  # after the warning: from here on the end of the run does not wait

    def _write(self, event: Event, step: int, values: Mapping[str, float]) -> None:
        if not self._is_open:
            self._is_open = True
            try:
                self.load()
            finally:
                self._loaded.set()
            known = event if isinstance(event, RunStarted) else None
            self.begin(known.name if known else "run", known.settings if known else {})
        if values:
            self.write(event, step, values)
        if isinstance(event, RunFinished | RunFailed):
            self._is_open = False
            self.end(has_failed=isinstance(event, RunFailed))

    def load(self) -> None:  # noqa: B027  (not all tools have a client)
        """Imports the client of the tool, which may take seconds."""

    def flush(self) -> None:  # noqa: B027  (most keep nothing back)
        """Writes what `write` has kept back; called when no event has come for a second."""

    @abstractmethod
    def begin(self, name: str, settings: Settings) -> None:
        """Opens what is written to; a run has a name and settings."""

    @abstractmethod
    def write(self, event: Event, step: int, values: Mapping[str, float]) -> None:
        """Writes the numbers of an event under the names of `values`."""

    @abstractmethod
    def end(self, *, has_failed: bool) -> None:
        """Closes what `begin` opened; the run has ended."""


def require_client(module: str, *, extra: str, name: str) -> None:
    """Raises `SpecError` if the module of a tool is not installed."""
    if find_spec(module) is None:
        raise SpecError(f"{name} was made, but {module} is not installed. Run: pip install 'evenly[{extra}]'.")
