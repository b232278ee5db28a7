"""Ranks that do something together: all come first, errors reach the others, nothing stays open."""

import time

import pytest
from torch.distributed import HashStore

from evenly.comm import FailureMonitor, RankGroup, open_context, open_temporarily, report_on_error
from evenly.errors import PeerError, SpecError
from tests.ranks import RankError, run_ranks

LIMITS = {"label": "the test", "timeout_s": 20.0}


def test_ranks_gather_values_one_after_another_and_in_contexts_one_after_another():
    def act(rank_group: RankGroup) -> list[list[int]]:
        found = []
        for number in range(2):
            with open_context(rank_group.scoped(f"context {number}"), "all", **LIMITS) as context:
                context.meet()
                found.append(context.gather(10 * number + context.rank_group.rank))
        return found

    assert run_ranks(3, act) == [[[0, 1, 2], [10, 11, 12]]] * 3


def test_a_rank_alone_needs_nobody():
    with open_context(RankGroup(0, 1, HashStore()), "all", **LIMITS) as context:
        assert context.gather("me") == ["me"]


def test_an_error_of_one_rank_reaches_those_that_wait_long_before_the_time_limit():
    def act(rank_group: RankGroup) -> None:
        with open_context(rank_group, "all", **LIMITS) as context:
            if rank_group.rank == 1:
                raise SpecError("this rank was given something else.")
            context.meet()

    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(3, act)
    assert time.monotonic() - began < LIMITS["timeout_s"] / 2
    for rank, error in enumerate(caught.value.errors):
        assert isinstance(error, SpecError)
        assert ("rank 1 on" in str(error)) == (rank != 1)


def test_an_error_inside_a_group_of_some_ranks_reaches_all():
    def act(rank_group: RankGroup) -> None:
        with open_context(rank_group, "all", **LIMITS) as context:
            if rank_group.rank < 2:
                limits = {"monitor": context.monitor, "backend": "gloo", "timeout_s": 20.0}
                with open_temporarily(rank_group, "some", [0, 1], **limits) as group:
                    assert group.size() == 2
                    if rank_group.rank == 0:
                        raise ValueError("no such way")
            context.meet()

    with pytest.raises(RankError) as caught:
        run_ranks(3, act)
    assert [type(error) for error in caught.value.errors] == [ValueError, PeerError, PeerError]
    assert "ValueError: no such way" in str(caught.value.errors[2])


def test_a_rank_that_does_not_come_is_named():
    def act(rank_group: RankGroup) -> None:
        if rank_group.rank != 1:
            with open_context(rank_group, "all", label="the test", timeout_s=0.5):
                pytest.fail("the body began before all ranks had come")

    with pytest.raises(RankError) as caught:
        run_ranks(3, act)
    assert caught.value.errors[1] is None
    assert "at the test" in str(caught.value.errors[0])
    assert "[1] did not arrive" in str(caught.value.errors[0])


def test_what_rings_the_parent_ends_the_context():
    def act(rank_group: RankGroup) -> None:
        parent = FailureMonitor(rank_group.scoped("parent"))
        try:
            with open_context(rank_group.scoped("own"), "all", parent=parent, **LIMITS) as context:
                if rank_group.rank == 0:
                    parent.report(SpecError("the session has ended."))
                    return
                context.meet()
                context.meet()
        finally:
            parent.close()

    with pytest.raises(RankError) as caught:
        run_ranks(2, act)
    assert "the session has ended." in str(caught.value.errors[1])


@pytest.mark.parametrize("closes", [False, True])
def test_an_alarm_rings_for_an_error_and_is_closed_where_asked(closes: bool):
    def act(rank_group: RankGroup) -> tuple[bool, bool]:
        monitor = FailureMonitor(rank_group)
        if rank_group.rank == 0:
            with pytest.raises(ValueError, match="wrong"), report_on_error(monitor, closes=closes):
                raise ValueError("wrong")
        is_watching = monitor._thread.is_alive()
        monitor.close()
        return monitor.has_failed, is_watching

    assert run_ranks(2, act)[0] == (True, not closes)
