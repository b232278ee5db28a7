"""Keys and values that the ranks of a generation share, as torch's stores have them."""

from collections import OrderedDict
from dataclasses import dataclass, field

KEPT_GENERATIONS = 4
KEPT_ENDED = 64
MOST_GENERATION_BYTES = 2**24


class KeysGoneError(Exception):
    """The generation has ended, or the value is not what is asked for."""


@dataclass
class _Generation:
    values: OrderedDict[str, bytes] = field(default_factory=OrderedDict)  # those set last at the end
    num_bytes: int = 0

    def forget(self, key: str) -> None:
        if key in self.values:
            self.num_bytes -= len(key) + len(self.values.pop(key))


class KeyTable:
    """The values of the last generations; of each as many as fit, those that were set last."""

    def __init__(self) -> None:
        self._generations: OrderedDict[str, _Generation] = OrderedDict()
        self._ended: OrderedDict[str, str] = OrderedDict()

    def put(self, generation: str, key: str, value: bytes) -> None:
        """Sets a value; raises `KeysGoneError`."""
        kept = self._of(generation)
        kept.forget(key)
        kept.values[key] = value
        kept.num_bytes += len(key) + len(value)
        while kept.num_bytes > MOST_GENERATION_BYTES:  # many rounds may pass in one generation
            kept.forget(next(iter(kept.values)))

    def get(self, generation: str, key: str) -> bytes | None:
        """Returns a value, or None if nobody has set it yet; raises `KeysGoneError`."""
        return self._of(generation).values.get(key)

    def add(self, generation: str, key: str, amount: int) -> int:
        """Returns the number at `key` after `amount` was added; raises `KeysGoneError`."""
        try:
            total = int(self.get(generation, key) or b"0") + amount
        except ValueError:
            raise KeysGoneError(f"{key} is not a number") from None
        self.put(generation, key, str(total).encode())
        return total

    def end(self, generation: str, why: str) -> None:
        """Forgets a generation."""
        self._generations.pop(generation, None)
        self._ended[generation] = why
        while len(self._ended) > KEPT_ENDED:
            self._ended.popitem(last=False)

    def begin(self, generation: str) -> list[str]:
        """Adds a generation if it is not known; returns those that are forgotten for it."""
        self._generations.setdefault(generation, _Generation())
        forgotten = []
        while len(self._generations) > KEPT_GENERATIONS:
            forgotten.append(self._generations.popitem(last=False)[0])
        for name in forgotten:
            self.end(name, "later rounds have other members")
        return forgotten

    def _of(self, generation: str) -> _Generation:
        if generation not in self._generations:
            raise KeysGoneError(self._ended.get(generation, "the coordinator does not know it"))
        return self._generations[generation]
