"""The time of a run: what the program does while it is paused is not counted."""

import time


class RunClock:
    """Runs from the start, and can be paused: in turns with other runs, or for a long evaluation."""

    def __init__(self) -> None:
        self._paused_s = 0.0  # in all pauses that are over
        self._paused_at: float | None = None

    def pause(self) -> None:
        """Stops the time of the run; a second call does nothing."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def resume(self) -> None:
        """Lets the time of the run go on; nothing happens unless it is paused."""
        if self._paused_at is not None:
            self._paused_s += time.monotonic() - self._paused_at
            self._paused_at = None

    def monotonic(self) -> float:
        """Returns seconds that only grow, pauses left out."""
        return (time.monotonic() if self._paused_at is None else self._paused_at) - self._paused_s

    def time(self) -> float:
        """Returns the seconds since 1970, less those of all pauses."""
        open_pause_s = 0.0 if self._paused_at is None else time.monotonic() - self._paused_at
        return time.time() - self._paused_s - open_pause_s
