"""Bad input and bad luck: every rank learns what is wrong, which rank it was, and soon."""

import copy
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from evenly.errors import LockstepError, MismatchError, NonFiniteError, PeerError, SpecError
from evenly.launch.ports import free_port
from evenly.nodes import join_nodes
from evenly.spec import Exchange, period_of
from tests.ranks import RankError, cluster_of, ragged, run_ranks


def join(rank_group, nodes, model, *, every=2, optimizer=None, **exchange):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    settings = Exchange(**{"timeout_s": 60.0, **exchange})
    synchronized = join_nodes(
        model, optimizer, rank_group=rank_group, cluster=cluster_of(nodes), period=period_of(every), exchange=settings
    )
    return synchronized, optimizer


def steps(synchronized, optimizer, count, *, poison=None, value=1.0, scale=1.0):
    for step in range(1, count + 1):
        optimizer.zero_grad()
        loss = scale * synchronized(torch.full((3, 4), value)).mean()
        if poison == step:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()


def failing(count, act, *args):
    """Returns the errors of all ranks; every rank must raise."""
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(count, act, *args, limit_s=30.0)
    errors = caught.value.errors
    assert all(errors), f"some rank did not notice: {errors}"
    assert time.monotonic() - began < 20, "the ranks learned it too late"
    return errors


def test_different_models_are_named_before_the_first_step():
    def act(rank_group):
        width = 5 if rank_group.rank == 2 else 4
        join(rank_group, ragged(2, 1), nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1)))

    for error in failing(3, act):
        assert isinstance(error, MismatchError)
        assert "'0.weight'" in str(error)
        assert "ranks [0, 1]" in str(error)
        assert "ranks [2]" in str(error)


def test_swapped_layers_of_the_same_shape_are_noticed():
    class Swapped(nn.Module):
        def __init__(self, first, second):
            super().__init__()
            self.add_module(first, nn.Linear(4, 4))
            self.add_module(second, nn.Linear(4, 4))

    def act(rank_group):
        join(rank_group, ragged(1, 1), Swapped("a", "b") if rank_group.rank else Swapped("b", "a"))

    assert all(isinstance(error, MismatchError) for error in failing(2, act))


def test_different_periods_are_noticed():
    def act(rank_group):
        join(rank_group, ragged(1, 1), nn.Linear(4, 1), every=3 + rank_group.rank)

    for error in failing(2, act):
        assert isinstance(error, MismatchError)
        assert "steps=3" in str(error)


def test_an_optimizer_of_other_tensors_is_refused():
    def act(rank_group):
        join(rank_group, ragged(1), nn.Linear(4, 1), optimizer=torch.optim.SGD([nn.Parameter(torch.ones(7))], lr=0.1))

    with pytest.raises(RankError, match=r"\[7\]"):
        run_ranks(1, act)


def test_a_model_that_does_not_train_is_refused():
    def act(rank_group):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.requires_grad_(False)
        join(rank_group, ragged(1), model, optimizer=optimizer)

    with pytest.raises(RankError, match="trainable") as caught:
        run_ranks(1, act)
    assert isinstance(caught.value.errors[0], SpecError)


@pytest.mark.parametrize("nodes", [ragged(2, 1), ragged(3), ragged(1, 1, 1)], ids=str)
def test_nan_on_one_rank_stops_all_and_names_rank_and_step(nodes):
    def act(rank_group):
        synchronized, optimizer = join(rank_group, nodes, nn.Linear(4, 1), every=100)
        try:
            for _ in range(200):  # the other nodes go on until they hear of it
                steps(
                    synchronized,
                    optimizer,
                    1,
                    poison=1 if rank_group.rank == 1 and synchronized.schedule.step == 4 else None,
                )
                time.sleep(0.02)
        finally:
            synchronized.close()

    for error in failing(3, act):
        assert isinstance(error, NonFiniteError)
        assert "[1]" in str(error)
        assert "step 5" in str(error)


def test_nan_in_global_mode_names_the_rank():
    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(2, 1), nn.Linear(4, 1), every="global")
        try:
            steps(synchronized, optimizer, 6, poison=3 if rank_group.rank == 2 else None)
        finally:
            synchronized.close()

    for error in failing(3, act):
        assert isinstance(error, NonFiniteError)
        assert "[2]" in str(error)
        assert "step 3" in str(error)


def test_nan_steps_are_skipped_when_asked():
    def act(rank_group):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        synchronized, optimizer = join(rank_group, ragged(2, 1), model, nonfinite="skip", every=2)
        steps(synchronized, optimizer, 5, poison=3 if rank_group.rank == 0 else None)
        synchronized.finish()
        synchronized.close()
        return model.weight.detach(), synchronized.schedule.step

    results = run_ranks(3, act)
    for weight, step in results:
        assert torch.isfinite(weight).all()
        assert torch.equal(weight, results[0][0])
        assert step == 5


@pytest.mark.parametrize("nodes", [ragged(1, 1), ragged(2), ragged(2, 1)], ids=str)
@pytest.mark.parametrize(("every", "overlap"), [(100, 0), (4, 0), (4, 3)])
def test_unequal_numbers_of_steps_are_told(nodes, every, overlap):
    ranks = sum(map(len, nodes))

    def act(rank_group):
        synchronized, optimizer = join(rank_group, nodes, nn.Linear(4, 1), every=every, overlap=overlap)
        try:
            steps(synchronized, optimizer, 9 if rank_group.rank else 10)
            synchronized.finish()
        finally:
            synchronized.close()

    for error in failing(ranks, act):
        assert isinstance(error, LockstepError)
        assert "9" in str(error)


@pytest.mark.parametrize("nodes", [ragged(1, 1), ragged(2)], ids=str)
def test_an_empty_data_shard_is_told(nodes):
    def act(rank_group):
        synchronized, optimizer = join(rank_group, nodes, nn.Linear(4, 1))
        try:
            steps(synchronized, optimizer, 5 if rank_group.rank else 0)
            synchronized.finish()
        finally:
            synchronized.close()

    for error in failing(2, act):
        assert isinstance(error, LockstepError)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_rank_that_never_arrives_is_named_at_the_time_limit(overlap):
    is_told = threading.Event()

    def act(rank_group):
        settings = {"timeout_s": 4.0, "overlap": overlap}  # long enough to start on a busy machine
        synchronized, optimizer = join(rank_group, ragged(1, 1, 1), nn.Linear(4, 1), every=2, **settings)
        try:
            if rank_group.rank == 2:
                is_told.wait(20)  # alive, but elsewhere
                return
            steps(synchronized, optimizer, 2 + overlap)
        finally:
            if rank_group.rank != 2:
                is_told.set()
            synchronized.close()

    with pytest.raises(RankError) as caught:
        run_ranks(3, act)
    first, second, absent = caught.value.errors
    assert absent is None
    for error in (first, second):
        assert isinstance(error, PeerError)
        assert "ranks [2] did not arrive" in str(error)


@pytest.mark.parametrize(("every", "overlap"), [(50, 0), (2, 2)])
def test_an_error_in_the_loop_of_one_rank_reaches_the_others(every, overlap):
    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(2, 1), nn.Linear(4, 1), every=every, overlap=overlap)
        try:
            for _ in range(300):
                steps(synchronized, optimizer, 1)
                if rank_group.rank == 1 and synchronized.schedule.step == 3:
                    raise KeyError("a broken sample")
                time.sleep(0.02)
        except Exception as error:
            synchronized.report(error)
            raise
        finally:
            synchronized.close()

    errors = failing(3, act)
    assert isinstance(errors[1], KeyError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerError)
        assert "rank 1" in str(error)
        assert "a broken sample" in str(error)


def test_a_failed_exchange_leaves_the_parameters_untouched():
    kept, is_told = {}, threading.Event()

    def act(rank_group):
        model = nn.Linear(4, 1)
        synchronized, optimizer = join(rank_group, ragged(1, 1), model, every=3, timeout_s=3.0)
        try:
            steps(synchronized, optimizer, 2)
            if rank_group.rank == 1:
                is_told.wait(20)
                return
            kept["before"] = [p.detach().clone() for p in model.parameters()]
            try:
                steps(synchronized, optimizer, 1, scale=0.0)  # the third step: its exchange cannot complete
            finally:
                kept["after"] = [p.detach().clone() for p in model.parameters()]
                is_told.set()
        finally:
            synchronized.close()

    with pytest.raises(RankError, match=r"PeerError: .*ranks \[1\] did not arrive"):
        run_ranks(2, act)
    torch.testing.assert_close(kept["after"], kept["before"], rtol=0, atol=0)


def test_a_failed_exchange_beside_the_training_leaves_the_parameters_untouched():
    kept, is_told = {}, threading.Event()

    def act(rank_group):
        model = nn.Linear(4, 1)
        settings = {"timeout_s": 3.0, "overlap": 2, "codec": "int8"}
        synchronized, optimizer = join(rank_group, ragged(1, 1), model, every=3, **settings)
        try:
            steps(synchronized, optimizer, 2 if rank_group.rank else 4)
            if rank_group.rank == 1:
                is_told.wait(20)
                return
            kept["before"] = [p.detach().clone() for p in model.parameters()]
            try:
                steps(synchronized, optimizer, 1, scale=0.0)  # the exchange begun after the third cannot be merged
            finally:
                kept["after"] = [p.detach().clone() for p in model.parameters()]
                is_told.set()
        finally:
            synchronized.close()

    with pytest.raises(RankError, match=r"PeerError: .*ranks \[1\] did not arrive"):
        run_ranks(2, act)
    torch.testing.assert_close(kept["after"], kept["before"], rtol=0, atol=0)


def test_a_model_closed_with_an_exchange_under_way():
    def act(rank_group):
        model, merged = nn.Linear(4, 1), []
        settings = {"overlap": 2, "timeout_s": 20.0}
        synchronized, optimizer = join(rank_group, ragged(1, 1), model, every=3, **settings)
        synchronized.on_exchange.append(merged.append)
        alone = copy.deepcopy(model)
        steps(synchronized, optimizer, 3, value=1.0 + rank_group.rank)
        synchronized.close()
        steps(model, optimizer, 3, value=1.0 + rank_group.rank)
        steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 6, value=1.0 + rank_group.rank)
        return list(model.parameters()), list(alone.parameters()), merged

    for trained, alone, merged in run_ranks(2, act):
        assert merged == []
        torch.testing.assert_close(trained, alone, rtol=0, atol=0)


def test_a_program_that_ends_with_an_exchange_under_way_ends_by_its_own_error():
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.nodes.leaving"],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=60)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [1, 1], told  # no signal
    assert "ValueError: an error of the program" in told[1]
    assert "PeerError" in told[0]


def test_forward_without_a_tensor_asks_for_count():
    def act(rank_group):
        synchronized, _ = join(rank_group, ragged(1), nn.Linear(4, 1))
        try:
            synchronized("text")
        finally:
            synchronized.close()

    with pytest.raises(RankError, match="count="):
        run_ranks(1, act)
