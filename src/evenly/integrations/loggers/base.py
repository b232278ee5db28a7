"""The base of all loggers: begins with the first event, ends with the run."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec

from evenly.errors import SpecError
from evenly.integrations.loggers.values import EventValues
from evenly.spec import Event, RunFailed, RunFinished, RunStarted

logger = logging.getLogger(__name__)

Settings = Mapping[str, str | int | float | bool | None]


class EventLogger(ABC):
    """A listener that sends the numbers of events elsewhere.

    It can be made on every rank: nothing is opened before the first event, and only rank 0 gets events. If the tool
    fails, a warning says so, and the run goes on without it.
    """

    def __init__(self) -> None:
        self._values = EventValues()
        self._is_open = self._has_failed = False

    def __call__(self, event: Event) -> None:
        """Sends one event."""
        if self._has_failed:
            return
        try:
            self._send(event)
        except Exception as error:  # whatever the tool raises must not end the training
            self._has_failed = True
            logger.warning(
                "%s cannot log any more: %s: %s. The run goes on without it.",
                type(self).__name__,
                type(error).__name__,
                " ".join(str(error).split()),
            )

    def _send(self, event: Event) -> None:
        if not self._is_open:
            self._is_open = True
            known = event if isinstance(event, RunStarted) else None
            self.begin(known.name if known else "run", known.settings if known else {})
        step, values = self._values(event)
        if values:
            self.write(event, step, values)
        if isinstance(event, RunFinished | RunFailed):
            self._is_open = False
            self.end(has_failed=isinstance(event, RunFailed))

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
