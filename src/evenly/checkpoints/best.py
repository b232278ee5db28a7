"""Which checkpoints of a run stay on disk: the newest, and those with the best value of a number that was logged.

The values are in `best.json` beside the checkpoints; rank 0 writes it.
"""

import json
import logging
import math
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from evenly.checkpoints.files import flush
from evenly.checkpoints.folder import BEST, checkpoints, step_of
from evenly.errors import CheckpointError, SpecError

logger = logging.getLogger(__name__)

Mode = Literal["min", "max"]
KeepBest = str | tuple[str, Mode] | tuple[str, Mode, int]

SMALL_IS_BETTER = ("loss", "error", "perplexity")  # in the name of a number
EXAMPLES = "keep_best='accuracy', keep_best=('loss', 'min') or keep_best=('accuracy', 'max', 3)"


@dataclass(frozen=True)
class BestRule:
    """The number that `session.log` gets, whether small or large values are better, and how many checkpoints stay."""

    name: str
    mode: Mode
    count: int = 1

    @classmethod
    def of(cls, keep_best: KeepBest) -> "BestRule":
        """Returns the rule that `Session(keep_best=...)` names.

        >>> BestRule.of(("loss", "min", 3))
        BestRule(name='loss', mode='min', count=3)
        """
        if isinstance(keep_best, str):
            if any(word in keep_best.lower() for word in SMALL_IS_BETTER):
                raise SpecError(
                    f"keep_best={keep_best!r} was given, which would keep the largest value. "
                    f"Say which is better: keep_best=({keep_best!r}, 'min')."
                )
            return cls(keep_best, "max")
        parts = tuple(keep_best) if isinstance(keep_best, tuple | list) else ()
        name, mode, count = parts if len(parts) == 3 else (*parts, 1) if len(parts) == 2 else (None, None, 1)
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        if not isinstance(name, str) or mode not in ("min", "max") or not is_count:
            raise SpecError(
                f"keep_best={keep_best!r} was given, which is no name, mode and number of checkpoints. "
                f"Write {EXAMPLES}."
            )
        return cls(name, mode, cast("int", count))

    def best(self, values: Mapping[int, float]) -> list[int]:
        """Returns the steps with the best values, best first; of equal values the earliest."""
        sign = 1 if self.mode == "min" else -1
        return sorted(values, key=lambda step: (sign * values[step], step))[: self.count]


class KeptCheckpoints:
    """Decides which checkpoints stay, from the values that were logged on rank 0."""

    def __init__(self, newest: int, keep_best: KeepBest | None = None, *, folder: Path | None = None) -> None:
        if keep_best is not None and folder is None:
            raise SpecError(
                f"keep_best={keep_best!r} was given, but the session has no folder. Use Session('runs/name')."
            )
        self.newest = newest
        self._rule = None if keep_best is None else BestRule.of(keep_best)
        self._logged: dict[int, float | None] = {}  # by step, since the last checkpoint
        self._root: Path | None = None  # of the last checkpoint, on rank 0
        self._saving: int | None = None  # the step of the last checkpoint, which may not be complete
        self._chosen: dict[int, float] | None = None  # the values of the checkpoints, with that one, once it was read
        self._lock = threading.Lock()  # of the file
        self._other_names: set[str] = set()  # logged while the rule's number was not

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Notes the value of a step; if the checkpoint of the step is saved already, it is this one's."""
        if self._rule is None:
            return
        if self._rule.name not in values:
            self._other_names |= values.keys()
            return
        value = values[self._rule.name]
        self._logged[step] = None if value is None or not math.isfinite(float(value)) else float(value)
        if self._root is not None and step in self._saved_steps(self._root):
            self._chosen = self._values(self._root, None)
            try:
                self.write(self._root)
            except OSError as error:  # the next checkpoint writes it, or fails for all ranks
                logger.warning("%s could not be written: %s", self._root / BEST, error.strerror or error)

    def choose(self, root: Path, step: int) -> list[str]:
        """Returns the names of the best checkpoints once that of `step` is saved; called on rank 0, before it is.

        The value of a checkpoint is the one logged at its step or, without one, the last since the checkpoint before.
        """
        if self._rule is None:
            return []
        self._root, self._saving = root, None
        self._chosen = self._values(root, step)
        self._saving = step
        if self._other_names and not self._chosen:
            others = ", ".join(sorted(self._other_names))
            logger.warning("keep_best=%r keeps nothing yet: session.log got only %s", self._rule.name, others)
        self._other_names = set()
        return [f"step-{best:09d}" for best in self._rule.best(self._chosen)]

    def write(self, root: Path) -> None:
        """Writes the values of the checkpoints beside them; on rank 0, from any thread."""
        if self._rule is None or self._chosen is None:
            return
        with self._lock:
            values = {str(step): value for step, value in self._chosen.items()}
            text = {"version": 1, "name": self._rule.name, "mode": self._rule.mode, "values": values}
            root.mkdir(parents=True, exist_ok=True)
            partial = root / f".{BEST}"
            partial.write_text(json.dumps(text, indent=1))
            flush(partial)
            partial.replace(root / BEST)

    def _saved_steps(self, root: Path) -> set[int]:
        """Returns the steps of the checkpoints, with that of the one that is being saved."""
        return _saved_steps(root) | ({self._saving} if self._saving is not None else set())

    def _values(self, root: Path, new: int | None) -> dict[int, float]:
        """Returns the value of each checkpoint; values logged at steps without one are those of `new`."""
        rule = cast("BestRule", self._rule)
        saved = self._saved_steps(root)
        before = _read(root, rule) if self._chosen is None else self._chosen
        values: dict[int, float | None] = {s: v for s, v in before.items() if s in saved}
        for logged_step, value in sorted(self._logged.items()):
            if logged_step in saved or logged_step == new:
                values[logged_step] = value
            elif new is not None and new not in self._logged:
                values[new] = value
        self._logged = {s: v for s, v in self._logged.items() if new is None and s not in saved}
        return {step: value for step, value in values.items() if value is not None}


def best_step(root: Path, saved: Collection[int]) -> int:
    """Returns the step of the best checkpoint of a run among those that are saved."""
    content = _content(root)
    if content is None:
        raise CheckpointError(
            f"the best checkpoint was asked for, but the run in {root} was made without keep_best. Train with "
            f"Session(folder, {EXAMPLES.split(',')[0]}), or choose a step."
        )
    rule = BestRule(str(content["name"]), cast("Mode", content["mode"]))
    values = {step: value for step, value in _values_of(content).items() if step in saved}
    if not values:
        raise CheckpointError(
            f"the best checkpoint by {rule.name!r} was asked for, but no checkpoint in {root} has a value of it. Call "
            f"session.log({rule.name}=...) on rank 0 before a checkpoint is saved, or choose a step."
        )
    return rule.best(values)[0]


def _read(root: Path, rule: BestRule) -> dict[int, float]:
    """Returns the values of a run's checkpoints, if they are of the same number."""
    content = _content(root)
    return _values_of(content) if content is not None and content["name"] == rule.name else {}


def _content(root: Path) -> dict[str, Any] | None:
    file = root / BEST
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
        _values_of(content)
        is_known = content["version"] == 1 and isinstance(content["name"], str) and content["mode"] in ("min", "max")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_known = False
    if not is_known:
        raise CheckpointError(
            f"the values of checkpoints were to be read from {file}, but it is damaged or of another version. "
            "Remove it: the checkpoints themselves stay."
        )
    return cast("dict[str, Any]", content)


def _values_of(content: Mapping[str, Any]) -> dict[int, float]:
    return {int(step): float(value) for step, value in content["values"].items()}


def _saved_steps(root: Path) -> set[int]:
    return {step_of(path) for path in checkpoints(root)}
