"""When a rank fails or does not come, the others learn who and why, soon."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from evenly import EvenlyError
from evenly.comm import CollectiveWaiter, FailureMonitor, RankGroup, all_reduce, first_line, open_group
from evenly.errors import DataError, PeerError
from tests.ranks import RankError, run_ranks

SOON_S = 2.0


def learn(monitor: FailureMonitor) -> tuple[EvenlyError, float]:
    """Returns the error that the alarm brings, and after how many seconds."""
    began = time.monotonic()
    while time.monotonic() - began < 10:
        try:
            monitor.check()
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
    def act(rank_group: RankGroup):
        monitor = FailureMonitor(rank_group)
        try:
            if rank_group.rank == 1:
                monitor.report(error)
                monitor.report(DataError("only the first failure counts"))
                rank_group.store.wait(["learnt/0", "learnt/2"])
                monitor.poll()  # who rings is not told what it knows
                return None
            found = learn(monitor)
            rank_group.store.set(f"learnt/{rank_group.rank}", "1")
            return found
        finally:
            monitor.close()

    first, _, last = run_ranks(3, act)
    for learnt, seconds in (first, last):
        assert type(learnt) is kind
        assert "rank 1 on " in str(learnt)
        assert f"stopped: {text}" in str(learnt)
        assert seconds < SOON_S


def test_a_future_that_will_never_be_done_is_let_go():
    def act(rank_group: RankGroup):
        monitor = FailureMonitor(rank_group)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        try:
            if rank_group.rank == 0:
                rank_group.store.wait(["held"])
                monitor.report(DataError("no data"))
                return None
            monitor.watch_future(future, torch.tensor([7.0]))
            rank_group.store.set("held", "1")
            began = time.monotonic()
            value = future.wait()
            late: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            monitor.watch_future(late, torch.tensor([8.0]))  # after the alarm: at once
            return value.item(), late.wait().item(), time.monotonic() - began
        finally:
            monitor.close()

    _, (value, late, seconds) = run_ranks(2, act)
    assert (value, late) == (7.0, 8.0)
    assert seconds < SOON_S


def test_a_future_that_is_done_is_not_touched_by_a_later_alarm():
    monitor = FailureMonitor(RankGroup(0, 1, None))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    monitor.watch_future(future, torch.zeros(1))
    monitor.complete_future(future, torch.ones(1))
    monitor.fail(PeerError("late"))
    assert future.wait().item() == 1.0


def wait_at(rank_group: RankGroup, timeout_s: float, freed: threading.Barrier, stay_away) -> None:
    """Joins a sum over all ranks; the last rank first does something else."""
    monitor = FailureMonitor(rank_group)
    group = open_group(rank_group, "sum", range(rank_group.size), backend="gloo", timeout_s=20.0)
    waiter = CollectiveWaiter(monitor, label="the exchange", step=12, timeout_s=timeout_s)
    try:
        if rank_group.rank == rank_group.size - 1:
            stay_away(monitor, freed)
        waiter.wait([all_reduce(torch.ones(1), group)], waits_for_ranks=True)
    finally:
        if rank_group.rank < rank_group.size - 1:
            freed.wait(20)
        monitor.close()


def test_a_rank_that_does_not_come_is_named_at_the_time_limit(monkeypatch):
    monkeypatch.setattr("evenly.comm.collectives.SHORT_WAIT_S", 0.05)
    monkeypatch.setattr("evenly.comm.failure_monitor.INTERVAL_S", 0.05)
    began = time.monotonic()
    *waiting, absent = errors_of(3, wait_at, 1.0, threading.Barrier(3), lambda monitor, freed: freed.wait(20))
    assert time.monotonic() - began < 15
    for error in waiting:
        assert type(error) is PeerError
        assert "at the exchange after step 12: ranks [2] did not arrive" in str(error)
        assert "larger timeout_s" in str(error)
    assert absent is None or "ranks [2] did not arrive" in str(absent)


def test_who_waits_in_a_collective_hears_the_alarm_long_before_the_time_limit():
    def stay_away(monitor, freed):
        monitor.report(DataError("rank 2 has no data"))
        freed.wait(20)

    began = time.monotonic()
    first, second, _ = errors_of(3, wait_at, 60.0, threading.Barrier(3), stay_away)
    assert time.monotonic() - began < 15
    for error in (first, second):
        assert type(error) is DataError
        assert "rank 2 has no data" in str(error)


def test_a_rank_that_leaves_without_a_word_is_noticed(monkeypatch):
    monkeypatch.setattr("evenly.comm.failure_monitor.INTERVAL_S", 0.05)

    def act(rank_group: RankGroup):
        monitor = FailureMonitor(rank_group)
        group = open_group(rank_group, "sum", range(2), backend="gloo", timeout_s=20.0)
        try:
            if rank_group.rank == 0:
                CollectiveWaiter(monitor, label="the exchange", step=3).wait(
                    [all_reduce(torch.ones(1), group)], waits_for_ranks=True
                )
        finally:
            monitor.close()

    error, _ = errors_of(2, act)
    assert type(error) is PeerError
    assert "at the exchange after step 3 the connection of rank 0 to another rank broke" in str(error)


def test_a_rank_alone_has_nobody_to_tell():
    monitor = FailureMonitor(RankGroup(0, 1, None))
    monitor.report(ValueError("x"))
    monitor.waiting("a place", 3)
    monitor.check()
    monitor.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "evenly-failure-monitor"]


def test_closing_an_alarm_ends_its_thread_and_twice_does_no_harm(monkeypatch):
    monkeypatch.setattr("evenly.comm.failure_monitor.INTERVAL_S", 0.05)

    both_watch, both_closed = threading.Barrier(2), threading.Barrier(2)

    def watching() -> int:
        return sum(thread.name == "evenly-failure-monitor" for thread in threading.enumerate())

    def act(rank_group: RankGroup):
        monitor = FailureMonitor(rank_group)
        both_watch.wait(20)
        before = watching()
        both_watch.wait(20)
        monitor.close()
        monitor.close()
        both_closed.wait(20)
        monitor.check()  # no failure was told
        return before, watching()

    assert run_ranks(2, act) == [(2, 0), (2, 0)]


def test_a_callback_that_fails_is_told_once_and_does_not_end_the_watching(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("evenly.comm.failure_monitor.INTERVAL_S", 0.02)
    calls, ticked = [], threading.Semaphore(0)

    def fail() -> None:
        calls.append(1)
        raise ValueError("odd")

    monitor = FailureMonitor(RankGroup(0, 2, dist.HashStore()))
    try:
        monitor.on_tick += [fail, ticked.release]
        assert all(ticked.acquire(timeout=5) for _ in range(3))
    finally:
        monitor.close()
    monitor.remove_callback(fail)  # its owner does not know
    assert calls == [1]
    assert monitor.on_tick == [ticked.release]
    assert caplog.text.count("ValueError: odd") == 1


def test_the_first_line_of_an_error():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"


@pytest.mark.parametrize("passed", [True, False])
def test_a_note_that_is_read_late_is_no_fault_once_the_ranks_have_met(passed):
    """A rank that waited a while and was then joined must not be taken for one that fell behind."""

    def act(rank_group: RankGroup) -> str:
        monitor = FailureMonitor(rank_group, averages_with=(0, 1))
        try:
            if rank_group.rank == 0:
                monitor.waiting("exchange 1", step=2)
                rank_group.store.set("noted", "1")
                rank_group.store.wait(["read"])
            else:
                rank_group.store.wait(["noted"])
                if passed:
                    monitor.record_passed("exchange 1")
                monitor.backwards = 1
                try:
                    monitor.poll()
                finally:
                    rank_group.store.set("read", "1")
            monitor.check()
            return "fine"
        except EvenlyError as error:
            return type(error).__name__
        finally:
            monitor.close()

    assert run_ranks(2, act)[1] == ("fine" if passed else "LockstepError")
