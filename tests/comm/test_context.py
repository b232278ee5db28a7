"""Ranks that do something together: all come first, errors reach the others, nothing stays open."""

import time

import pytest
from torch.distributed import HashStore

from evenly._errors import PeerError, SpecError
from evenly.comm import Alarm, Party, open_context, open_for_now, ring_on_error
from tests.ranks import RankError, run_ranks

LIMITS = {"place": "the test", "timeout_s": 20.0}


def test_ranks_gather_values_one_after_another_and_in_contexts_one_after_another():
    def act(party: Party) -> list[list[int]]:
        found = []
        for number in range(2):
            with open_context(party.chapter(f"context {number}"), "all", **LIMITS) as context:
                context.meet()
                found.append(context.gather(10 * number + context.party.rank))
        return found

    assert run_ranks(3, act) == [[[0, 1, 2], [10, 11, 12]]] * 3


def test_a_rank_alone_needs_nobody():
    with open_context(Party(0, 1, HashStore()), "all", **LIMITS) as context:
        assert context.gather("me") == ["me"]


def test_an_error_of_one_rank_reaches_those_that_wait_long_before_the_time_limit():
    def act(party: Party) -> None:
        with open_context(party, "all", **LIMITS) as context:
            if party.rank == 1:
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
    def act(party: Party) -> None:
        with open_context(party, "all", **LIMITS) as context:
            if party.rank < 2:
                limits = {"alarm": context.alarm, "backend": "gloo", "timeout_s": 20.0}
                with open_for_now(party, "some", [0, 1], **limits) as group:
                    assert group.size() == 2
                    if party.rank == 0:
                        raise ValueError("no such way")
            context.meet()

    with pytest.raises(RankError) as caught:
        run_ranks(3, act)
    assert [type(error) for error in caught.value.errors] == [ValueError, PeerError, PeerError]
    assert "ValueError: no such way" in str(caught.value.errors[2])


def test_a_rank_that_does_not_come_is_named():
    def act(party: Party) -> None:
        if party.rank != 1:
            with open_context(party, "all", place="the test", timeout_s=0.5):
                pytest.fail("the body began before all ranks had come")

    with pytest.raises(RankError) as caught:
        run_ranks(3, act)
    assert caught.value.errors[1] is None
    assert "at the test" in str(caught.value.errors[0])
    assert "[1] did not arrive" in str(caught.value.errors[0])


def test_what_rings_the_parent_ends_the_context():
    def act(party: Party) -> None:
        parent = Alarm(party.chapter("parent"))
        try:
            with open_context(party.chapter("own"), "all", parent=parent, **LIMITS) as context:
                if party.rank == 0:
                    parent.ring(SpecError("the session has ended."))
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
    def act(party: Party) -> tuple[bool, bool]:
        alarm = Alarm(party)
        if party.rank == 0:
            with pytest.raises(ValueError, match="wrong"), ring_on_error(alarm, closes=closes):
                raise ValueError("wrong")
        is_watching = alarm._thread.is_alive()
        alarm.close()
        return alarm.has_rung, is_watching

    assert run_ranks(2, act)[0] == (True, not closes)
