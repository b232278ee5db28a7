"""Ranks of a session that make different calls are told so, instead of one reading the other's values."""

import pytest

from evenly.comm import FailureMonitor, ObjectGatherer, RankGroup, close_groups, open_group
from evenly.errors import LockstepError
from tests.ranks import RankError, run_ranks


def gather(rank_group: RankGroup, calls: list[tuple[str, str]]) -> list[object]:
    monitor = FailureMonitor(rank_group.scoped("assembly"))
    group = open_group(rank_group, "world", range(rank_group.size), backend="gloo", timeout_s=10)
    gatherer = ObjectGatherer(monitor, group, timeout_s=10)
    try:
        what, where = calls[rank_group.rank]
        return gatherer.gather([rank_group.rank, "x" * rank_group.rank], what, where=where)
    finally:
        close_groups([group])
        monitor.close()


def test_values_come_in_the_order_of_ranks() -> None:
    rows = run_ranks(3, gather, [("look into", " /a"), ("look into", " /b"), ("look into", " /a")])
    assert rows == [[[0, ""], [1, "x"], [2, "xx"]]] * 3


def test_different_calls_are_named_on_every_rank() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, gather, [("a sum of 2 over ranks", ""), ("begin a checkpoint in", " /a")])
    for error in caught.value.errors:
        assert isinstance(error, LockstepError)
        assert "rank 0: a sum of 2 over ranks; rank 1: begin a checkpoint in" in str(error)
