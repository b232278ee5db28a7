"""Sessions with a network cut over ranks: it trains as on one device, and resumes, also with other shares."""

import pytest
import torch
from torch import nn

from evenly.comm import RankGroup
from evenly.errors import SpecError
from evenly.nodes.composition import require_scaler
from evenly.session.sharding import plan_replicas
from evenly.shards import GradScaler, shard_model
from tests.processes import collect, run_processes, start_processes
from tests.ranks import cluster_of, ragged, run_ranks

TRAIN = "tests.session.shard_programs:train"
TRAIN_FACTORED = "tests.session.shard_programs:train_factored"


def parameters(result):
    return [torch.tensor(values, dtype=torch.float64) for values in result["parameters"]]


@pytest.fixture(scope="module")
def alone():
    """The parameters of a plain run on one rank."""
    return parameters(run_processes(ragged(1), TRAIN, {"shares": None})[0])


@pytest.mark.parametrize(("shares", "cut_batch"), [([70, 25, 5], False), ([1, 2], True)])
def test_a_cut_network_trains_as_on_one_device(alone, shares, cut_batch):
    for result in run_processes(ragged(len(shares)), TRAIN, {"shares": shares, "cut_batch": cut_batch}):
        torch.testing.assert_close(parameters(result), alone, rtol=1e-9, atol=1e-11)
        assert "hold one network" in result["explained"]


def test_a_run_that_crashed_resumes_bit_for_bit_and_with_other_shares(alone, tmp_path):
    common = {"shares": [2, 1], "folder": str(tmp_path / "run")}
    whole = run_processes(ragged(2), TRAIN, {"shares": [2, 1]})[0]
    crashed = collect(start_processes(ragged(2), TRAIN, {**common, "crash_at": 5}))
    assert [rank.code for rank in crashed] == [7, 7]
    again = run_processes(ragged(2), TRAIN, {**common, "keep": True})
    assert again[0]["first_step"] > 0
    assert again[0]["parameters"] == whole["parameters"]

    other = {"shares": [1, 3, 2], "folder": str(tmp_path / "other")}
    collect(start_processes(ragged(2), TRAIN, {**common, "folder": other["folder"], "crash_at": 5}))
    for result in run_processes(ragged(3), TRAIN, other):
        assert result["first_step"] > 0
        torch.testing.assert_close(parameters(result), alone, rtol=1e-9, atol=1e-11)


def test_state_of_a_factored_optimizer_is_averaged_as_by_hand():
    results = run_processes(ragged(2, 2), TRAIN_FACTORED, {"by_hand": False})
    assert results[0]["replicated"]
    for first, second in (results[:2], results[2:]):
        assert first["replicated"] == second["replicated"]
    assert results == run_processes(ragged(2, 2), TRAIN_FACTORED, {"by_hand": True})


@pytest.mark.parametrize(("ranks", "shares"), [(3, [40, 60]), (2, [70, 25, 5])])
def test_ranks_that_cannot_be_divided_into_networks(ranks, shares):
    told = f"{ranks} ranks cannot be divided into networks of {len(shares)}"
    with pytest.raises(SpecError, match=rf"node 'n0' has {ranks} ranks: {told}\. Give one share for each rank"):
        plan_replicas(nn.Linear(4, 4), torch.ones(2, 4), cluster_of(ragged(ranks)), shares)


def test_a_scaler_that_looks_at_one_rank_only_is_refused():
    def act(rank_group: RankGroup) -> None:
        sharded = shard_model(nn.Linear(4, 4), torch.ones(2, 4), rank_group=rank_group, shares=[3, 1])
        require_scaler(sharded, GradScaler("cpu"))
        require_scaler(sharded, None)
        with pytest.raises(SpecError, match=r"Use evenly\.shards\.GradScaler"):
            require_scaler(sharded, torch.amp.GradScaler("cpu"))
        sharded.close()

    run_ranks(2, act)
