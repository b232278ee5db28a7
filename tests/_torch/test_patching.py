"""What is replaced is what it was again, in whatever order several users end."""

import gc
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from evenly._torch.patching import SharedPatch, replace_attribute, replaced, restore_attribute


class Base:
    def act(self) -> str:
        return "plain"


class Derived(Base):
    pass


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("owner", [Base, Derived])
def test_users_may_end_in_any_order(owner: Any, order: tuple[int, ...]) -> None:
    before = dict(vars(owner))
    made = [replace_attribute(owner, "act", lambda self, number=number: number) for number in range(3)]
    left = {0, 1, 2}
    for number in order:
        assert owner().act() == max(left)
        restore_attribute(made[number])
        left.discard(number)
    assert dict(vars(owner)) == before
    assert owner().act() == "plain"


def test_what_somebody_else_puts_there_since_stays() -> None:
    owner = SimpleNamespace(act="plain")
    made = replace_attribute(owner, "act", "ours")
    owner.act = "theirs"
    restore_attribute(made)
    assert owner.act == "theirs"


def test_a_second_end_does_nothing() -> None:
    owner = SimpleNamespace(act="plain")
    first = replace_attribute(owner, "act", "first")
    restore_attribute(first)
    second = replace_attribute(owner, "act", "second")
    restore_attribute(first)
    assert owner.act == "second"
    restore_attribute(second)
    assert owner.act == "plain"


def test_a_block_that_raises_is_undone() -> None:
    owner = SimpleNamespace(act="plain")

    def fail() -> None:
        assert (owner.act, owner.more) == ("other", 1)
        raise KeyError

    with pytest.raises(KeyError), replaced(owner, "act", "other"), replaced(owner, "more", 1):
        fail()
    assert vars(owner) == {"act": "plain"}


def patch() -> tuple[SharedPatch, list[str]]:
    told: list[str] = []

    def apply() -> Any:
        told.append("in")
        return lambda: told.append("out")

    return SharedPatch(apply), told


def test_a_patch_is_there_from_the_first_user_to_the_last() -> None:
    shared, told = patch()
    first, second = shared.use(), shared.use()
    assert told == ["in"]
    first()
    first()
    assert told == ["in"]
    second()
    assert told == ["in", "out"]
    shared.use()()
    assert told == ["in", "out", "in", "out"]


def test_a_user_that_was_dropped_does_not_keep_a_patch() -> None:
    shared, told = patch()
    dropped, kept = shared.use(), shared.use()
    del dropped
    gc.collect()
    assert told == ["in"]
    kept()
    assert told == ["in", "out"]
