"""Ranks of a session that make different calls are told so, instead of one reading the other's values."""

import pytest

from evenly._errors import LockstepError
from evenly.comm import Alarm, Assembly, Party, close_groups, open_group
from tests.ranks import RankError, run_ranks


def gather(party: Party, calls: list[tuple[str, str]]) -> list[object]:
    alarm = Alarm(party.chapter("assembly"))
    group = open_group(party, "world", range(party.size), backend="gloo", timeout_s=10)
    assembly = Assembly(alarm, group, timeout_s=10)
    try:
        what, where = calls[party.rank]
        return assembly.gather([party.rank, "x" * party.rank], what, where=where)
    finally:
        close_groups([group])
        alarm.close()


def test_values_come_in_the_order_of_ranks() -> None:
    rows = run_ranks(3, gather, [("look into", " /a"), ("look into", " /b"), ("look into", " /a")])
    assert rows == [[[0, ""], [1, "x"], [2, "xx"]]] * 3


def test_different_calls_are_named_on_every_rank() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, gather, [("a sum of 2 over ranks", ""), ("begin a checkpoint in", " /a")])
    for error in caught.value.errors:
        assert isinstance(error, LockstepError)
        assert "rank 0: a sum of 2 over ranks; rank 1: begin a checkpoint in" in str(error)
