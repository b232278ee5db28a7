"""The times of many steps, of which an even selection is kept."""

from evenly.spec import Quartiles

MOST = 512  # times kept


class TimeSamples:
    """Keeps every time at first, then every 2nd, every 4th, ...: their quartiles are those of the whole run."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._every = 1
        self._count = 0

    def add(self, seconds: float) -> None:
        """Adds a time."""
        if self._count % self._every == 0:
            self._times_s.append(seconds)
        self._count += 1
        if len(self._times_s) >= MOST:
            self._times_s = self._times_s[::2]
            self._every *= 2

    def quartiles(self) -> Quartiles | None:
        """Returns the quartiles; None without times."""
        return Quartiles.of(self._times_s)
