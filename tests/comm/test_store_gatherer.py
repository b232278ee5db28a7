"""Values are gathered through the store alone, also while another rank fails."""

import threading
import time

import pytest

from evenly.comm import FailureMonitor, StoreGatherer
from evenly.comm import store_gatherer as rooms
from evenly.errors import PeerError
from tests.ranks import RankError, run_ranks


def opened(rank_group, timeout_s=30.0):
    monitor = FailureMonitor(rank_group.scoped("m"))
    return monitor, StoreGatherer(monitor, timeout_s=timeout_s)


def test_every_rank_gets_the_values_of_all_and_the_store_keeps_only_the_last():
    def act(rank_group):
        monitor, gatherer = opened(rank_group)
        try:
            rows = [gatherer.gather({"rank": rank_group.rank, "round": number}, "try") for number in range(20)]
            assert rows == [[{"rank": rank, "round": number} for rank in range(3)] for number in range(20)]
            return rank_group.store.raw.num_keys()
        finally:
            monitor.close()

    assert max(run_ranks(3, act)) < 40  # 3 values for each of 20 rounds would be 60


def test_a_rank_that_does_not_come_is_named():
    def act(rank_group):
        monitor, gatherer = opened(rank_group, timeout_s=0.5)
        try:
            if rank_group.rank != 1:
                gatherer.gather(1, "write the checkpoint")
        finally:
            monitor.close()

    with pytest.raises(RankError) as told:
        run_ranks(3, act)
    assert told.value.errors[1] is None
    for error in (told.value.errors[0], told.value.errors[2]):
        assert isinstance(error, PeerError)
        assert "to write the checkpoint, but ranks [1] did not" in str(error)


@pytest.mark.parametrize("comes", [True, False])
def test_after_a_failure_the_ranks_end_what_they_began(monkeypatch, comes):
    """The rank that has failed still comes, or it does not: then the others wait for a while only."""
    monkeypatch.setattr(rooms, "AFTER_FAILURE_S", 1.5)
    told = threading.Event()

    def act(rank_group):
        monitor, gatherer = opened(rank_group)
        try:
            if rank_group.rank == 1:
                monitor.report(ValueError("a broken sample"))
                told.set()
                time.sleep(1.0)  # the other one has heard of it
                return gatherer.gather(1, "write") if comes else None
            assert told.wait(10)
            began = time.monotonic()
            try:
                return gatherer.gather(0, "write")
            except PeerError:
                return round(time.monotonic() - began) < 10
        finally:
            monitor.close()

    assert run_ranks(2, act) == ([[0, 1], [0, 1]] if comes else [True, None])
