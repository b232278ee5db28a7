"""When a rank fails or does not come, the others learn who and why, soon."""

import threading
import time

import pytest
import torch

from evenly import EvenlyError, PeerError
from evenly._errors import DataError
from evenly.comm import Alarm, Party, Waiter, all_reduce, first_line, open_group
from tests.ranks import RankError, run_ranks

SOON_S = 2.0


def learn(alarm: Alarm) -> tuple[EvenlyError, float]:
    """Returns the error that the alarm brings, and after how many seconds."""
    began = time.monotonic()
    while time.monotonic() - began < 10:
        try:
            alarm.check()
        except EvenlyError as error:
            return error, time.monotonic() - began
        time.sleep(0.01)
    raise TimeoutError("the alarm did not reach this rank")


def errors_of(count: int, act, *args) -> list[BaseException | None]:
    with pytest.raises(RankError) as caught:
        run_ranks(count, act, *args)
    return caught.value.errors


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (DataError("no data. Fetch some."), DataError, "no data. Fetch some."),
        (ValueError("x is 3"), PeerError, "ValueError: x is 3"),
        (KeyboardInterrupt(), PeerError, "KeyboardInterrupt"),
    ],
)
def test_a_failure_reaches_the_other_ranks_with_its_class_and_text(error, kind, text):
    def act(party: Party):
        alarm = Alarm(party)
        try:
            if party.rank == 1:
                alarm.ring(error)
                alarm.ring(DataError("only the first failure counts"))
                party.store.wait(["learnt/0", "learnt/2"])
                alarm.hear()  # who rings is not told what it knows
                return None
            found = learn(alarm)
            party.store.set(f"learnt/{party.rank}", "1")
            return found
        finally:
            alarm.close()

    first, _, last = run_ranks(3, act)
    for learnt, seconds in (first, last):
        assert type(learnt) is kind
        assert "rank 1 on " in str(learnt)
        assert f"stopped: {text}" in str(learnt)
        assert seconds < SOON_S


def test_a_future_that_will_never_be_done_is_let_go():
    def act(party: Party):
        alarm = Alarm(party)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        try:
            if party.rank == 0:
                party.store.wait(["held"])
                alarm.ring(DataError("no data"))
                return None
            alarm.hold(future, torch.tensor([7.0]))
            party.store.set("held", "1")
            began = time.monotonic()
            value = future.wait()
            late: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            alarm.hold(late, torch.tensor([8.0]))  # after the alarm: at once
            return value.item(), late.wait().item(), time.monotonic() - began
        finally:
            alarm.close()

    _, (value, late, seconds) = run_ranks(2, act)
    assert (value, late) == (7.0, 8.0)
    assert seconds < SOON_S


def test_a_future_that_is_done_is_not_touched_by_a_later_alarm():
    alarm = Alarm(Party(0, 1, None))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    alarm.hold(future, torch.zeros(1))
    alarm.release(future, torch.ones(1))
    alarm.fail(PeerError("late"))
    assert future.wait().item() == 1.0


def wait_at(party: Party, timeout_s: float, freed: threading.Barrier, stay_away) -> None:
    """Joins a sum over all ranks; the last rank first does something else."""
    alarm = Alarm(party)
    group = open_group(party, "sum", range(party.size), backend="gloo", timeout_s=20.0)
    waiter = Waiter(alarm, place="the exchange", step=12, timeout_s=timeout_s)
    try:
        if party.rank == party.size - 1:
            stay_away(alarm, freed)
        waiter.wait([all_reduce(torch.ones(1), group)], meeting=True)
    finally:
        if party.rank < party.size - 1:
            freed.wait(20)
        alarm.close()


def test_a_rank_that_does_not_come_is_named_at_the_time_limit(monkeypatch):
    monkeypatch.setattr("evenly.comm.moves.QUIET_S", 0.05)
    monkeypatch.setattr("evenly.comm.alarm.INTERVAL_S", 0.05)
    began = time.monotonic()
    *waiting, absent = errors_of(3, wait_at, 1.0, threading.Barrier(3), lambda alarm, freed: freed.wait(20))
    assert time.monotonic() - began < 5
    for error in waiting:
        assert type(error) is PeerError
        assert "at the exchange after step 12: ranks [2] did not arrive" in str(error)
        assert "larger timeout_s" in str(error)
    assert absent is None or "ranks [2] did not arrive" in str(absent)


def test_who_waits_in_a_collective_hears_the_alarm_long_before_the_time_limit():
    def stay_away(alarm, freed):
        alarm.ring(DataError("rank 2 has no data"))
        freed.wait(20)

    began = time.monotonic()
    first, second, _ = errors_of(3, wait_at, 60.0, threading.Barrier(3), stay_away)
    assert time.monotonic() - began < 5
    for error in (first, second):
        assert type(error) is DataError
        assert "rank 2 has no data" in str(error)


def test_a_rank_that_leaves_without_a_word_is_noticed(monkeypatch):
    monkeypatch.setattr("evenly.comm.alarm.INTERVAL_S", 0.05)

    def act(party: Party):
        alarm = Alarm(party)
        group = open_group(party, "sum", range(2), backend="gloo", timeout_s=20.0)
        try:
            if party.rank == 0:
                Waiter(alarm, place="the exchange", step=3).wait([all_reduce(torch.ones(1), group)], meeting=True)
        finally:
            alarm.close()

    error, _ = errors_of(2, act)
    assert type(error) is PeerError
    assert "at the exchange after step 3 the connection of rank 0 to another rank broke" in str(error)


def test_a_rank_alone_has_nobody_to_tell():
    alarm = Alarm(Party(0, 1, None))
    alarm.ring(ValueError("x"))
    alarm.waiting("a place", 3)
    alarm.check()
    alarm.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "evenly-alarm"]


def test_closing_an_alarm_ends_its_thread_and_twice_does_no_harm(monkeypatch):
    monkeypatch.setattr("evenly.comm.alarm.INTERVAL_S", 0.05)

    both_watch, both_closed = threading.Barrier(2), threading.Barrier(2)

    def watching() -> int:
        return sum(thread.name == "evenly-alarm" for thread in threading.enumerate())

    def act(party: Party):
        alarm = Alarm(party)
        both_watch.wait(20)
        before = watching()
        both_watch.wait(20)
        alarm.close()
        alarm.close()
        both_closed.wait(20)
        alarm.check()  # no failure was told
        return before, watching()

    assert run_ranks(2, act) == [(2, 0), (2, 0)]


def test_the_first_line_of_an_error():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"


@pytest.mark.parametrize("passed", [True, False])
def test_a_note_that_is_read_late_is_no_fault_once_the_ranks_have_met(passed):
    """A rank that waited a while and was then joined must not be taken for one that fell behind."""

    def act(party: Party) -> str:
        alarm = Alarm(party, sharing=(0, 1))
        try:
            if party.rank == 0:
                alarm.waiting("exchange 1", step=2)
                party.store.set("noted", "1")
                party.store.wait(["read"])
            else:
                party.store.wait(["noted"])
                if passed:
                    alarm.passed("exchange 1")
                alarm.begun = 1
                try:
                    alarm.hear()
                finally:
                    party.store.set("read", "1")
            alarm.check()
            return "fine"
        except EvenlyError as error:
            return type(error).__name__
        finally:
            alarm.close()

    assert run_ranks(2, act)[1] == ("fine" if passed else "LockstepError")
