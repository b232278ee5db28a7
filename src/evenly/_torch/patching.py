"""Replaces attributes of torch temporarily; several users may replace the same one, and the original is restored."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

_lock = threading.RLock()
_replacements: "list[_Replacement]" = []  # the active ones, the oldest first


@dataclass(eq=False)
class _Replacement:
    """The value that one user has set for an attribute, and the value before."""

    owner: object  # a module or a class
    name: str
    value: object
    before: object
    is_own: bool  # whether `before` was the owner's own attribute, not one that it inherits

    def restore(self) -> None:
        if self.is_own:
            setattr(self.owner, self.name, self.before)
        else:
            delattr(self.owner, self.name)


def replace_attribute(owner: object, name: str, value: object) -> "_Replacement":
    """Sets an attribute to `value`; `restore_attribute` undoes it.

    Users may end in any order. If an earlier user ends first, the values of later users stay, and these restore the
    value from before the earlier user.
    """
    with _lock:
        is_own = name in vars(owner)
        replacement = _Replacement(owner, name, value, vars(owner).get(name), is_own)
        setattr(owner, name, value)
        _replacements.append(replacement)
        return replacement


def restore_attribute(replacement: "_Replacement") -> None:
    """Undoes a replacement; a second call does nothing, and values that others have set since stay."""
    with _lock:
        if replacement not in _replacements:
            return
        index = _replacements.index(replacement)
        del _replacements[index]
        later = next((candidate for candidate in _replacements[index:] if _is_of_same(candidate, replacement)), None)
        if later is not None:
            later.before, later.is_own = replacement.before, replacement.is_own
        elif vars(replacement.owner).get(replacement.name) is replacement.value:
            replacement.restore()


def _is_of_same(one: _Replacement, other: _Replacement) -> bool:
    return one.owner is other.owner and one.name == other.name


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Sets an attribute to `value` inside the block."""
    replacement = replace_attribute(owner, name, value)
    try:
        yield
    finally:
        restore_attribute(replacement)


class SharedPatch:
    """A process-wide patch with several users: the first one applies it, and the last one undoes it.

    Args:
        apply: applies the patch and returns a function that undoes it.
    """

    def __init__(self, apply: Callable[[], Callable[[], None]]) -> None:
        self._apply = apply
        self._undo: Callable[[], None] | None = None
        self._users: weakref.WeakSet[_User] = weakref.WeakSet()  # a use that was dropped without an end is not counted
        self._lock = threading.RLock()

    def use(self) -> Callable[[], None]:
        """Applies the patch unless it is active; returns a function that ends this use, and keeps it alive.

        A use that is dropped without an end does not undo the patch: garbage may be collected at any moment, also while
        torch iterates over its hooks. The next use that ends does.
        """
        user = _User()
        with self._lock:
            if self._undo is None:
                self._undo = self._apply()
            self._users.add(user)
        return partial(self._end, user)

    def _end(self, user: "_User") -> None:
        with self._lock:
            self._users.discard(user)
            if not self._users and self._undo is not None:
                self._undo()
                self._undo = None


class _User:
    """Identifies one use of a patch."""
