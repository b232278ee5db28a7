"""The time of a run, and the bytes that its machine sends: what passes while the run is paused is not counted."""

import time

import psutil


class RunClock:
    """Runs from the start, and can be paused: in turns with other runs, or for a long evaluation."""

    def __init__(self) -> None:
        self._paused_s = 0.0  # in all pauses that are over
        self._paused_bytes = 0  # sent in all pauses that are over
        self._paused_at: tuple[float, int] | None = None  # seconds and bytes at which the open pause began

    def pause(self) -> None:
        """Stops the clock; a second call does nothing."""
        if self._paused_at is None:
            self._paused_at = time.monotonic(), machine_bytes()

    def resume(self) -> None:
        """Lets the clock go on; nothing happens unless it is paused."""
        if self._paused_at is not None:
            paused_at_s, paused_at_bytes = self._paused_at
            self._paused_s += time.monotonic() - paused_at_s
            self._paused_bytes += machine_bytes() - paused_at_bytes
            self._paused_at = None

    def continue_from(self, other: "RunClock") -> None:
        """Takes over the pauses of another clock, also one that is open."""
        self._paused_s, self._paused_bytes = other._paused_s, other._paused_bytes
        self._paused_at = other._paused_at

    def monotonic(self) -> float:
        """Returns seconds that only grow, pauses left out."""
        return (time.monotonic() if self._paused_at is None else self._paused_at[0]) - self._paused_s

    def time(self) -> float:
        """Returns the seconds since 1970, less those of all pauses: the times of events leave pauses out."""
        open_pause_s = 0.0 if self._paused_at is None else time.monotonic() - self._paused_at[0]
        return time.time() - self._paused_s - open_pause_s

    def interface_bytes(self) -> int:
        """Returns the bytes that this machine has sent over its network interfaces, pauses left out."""
        return (machine_bytes() if self._paused_at is None else self._paused_at[1]) - self._paused_bytes


def machine_bytes() -> int:
    """Returns the bytes this machine or network namespace has sent over its interfaces, loopback left out."""
    counters = psutil.net_io_counters(pernic=True)
    return sum(count.bytes_sent for name, count in counters.items() if not name.startswith("lo"))
