"""Attributes of torch that are replaced for a while, by several users at once, and then are what they were."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

_lock = threading.RLock()
_replacements: "list[_Replacement]" = []  # those in force, the oldest first


@dataclass(eq=False)
class _Replacement:
    """What one user has put in the place of an attribute, and what was there before."""

    owner: Any
    name: str
    value: Any
    before: Any
    is_own: bool  # whether `before` was the owner's own attribute, not one that it inherits

    def restore(self) -> None:
        if self.is_own:
            setattr(self.owner, self.name, self.before)
        else:
            delattr(self.owner, self.name)


def replace_attribute(owner: Any, name: str, value: Any) -> "_Replacement":
    """Puts `value` in the place of an attribute; `restore_attribute` undoes it.

    Users may end in any order. Whoever ends first leaves what later users have put there, and they restore what was
    there before him.
    """
    with _lock:
        is_own = name in vars(owner)
        made = _Replacement(owner, name, value, vars(owner).get(name), is_own)
        setattr(owner, name, value)
        _replacements.append(made)
        return made


def restore_attribute(replacement: "_Replacement") -> None:
    """Undoes a replacement; a second call does nothing, and what others have put there since stays."""
    with _lock:
        if replacement not in _replacements:
            return
        place = _replacements.index(replacement)
        del _replacements[place]
        later = next((one for one in _replacements[place:] if _is_of_same(one, replacement)), None)
        if later is not None:
            later.before, later.is_own = replacement.before, replacement.is_own
        elif vars(replacement.owner).get(replacement.name) is replacement.value:
            replacement.restore()


def _is_of_same(one: _Replacement, other: _Replacement) -> bool:
    return one.owner is other.owner and one.name == other.name


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Has an attribute be `value` inside of the block."""
    replacement = replace_attribute(owner, name, value)
    try:
        yield
    finally:
        restore_attribute(replacement)


class SharedPatch:
    """A patch of the whole process that several users need: the first puts it in, and the last one takes it out.

    Args:
        apply: puts the patch in, and returns what takes it out.
    """

    def __init__(self, apply: Callable[[], Callable[[], None]]) -> None:
        self._apply = apply
        self._undo: Callable[[], None] | None = None
        self._users: weakref.WeakSet[_User] = weakref.WeakSet()  # one that was dropped without an end is no user
        self._lock = threading.RLock()

    def use(self) -> Callable[[], None]:
        """Puts the patch in unless it is there; returns what ends this use, and keeps it alive.

        A use that is dropped without an end does not take the patch out: memory is collected at any moment, also while
        torch goes through its hooks. The next one that ends does.
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
    """Someone who needs a patch."""
