"""Lightning's Trainer on two unequal nodes: each step is that of the reference; a resumed run goes on as it was."""

import copy
import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.integrations.batches import (
    NODES,
    SIZES,
    batch,
    batches_of,
    gan_networks,
    judge_loss,
    maker_loss,
    network,
    reference,
    values,
)
from tests.processes import run_processes
from tests.reference import Reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed: pip install lightning"),
]
loss = torch.nn.functional.mse_loss


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of three processes saw in all programs: to start them takes longest."""
    arguments = {"folder": str(tmp_path_factory.mktemp("lightning"))}
    return run_processes(NODES, "tests.integrations.lightning_programs:run_all", arguments, limit_s=300.0)


def close(found: Sequence[float], expected: Sequence[float]) -> None:
    assert found == pytest.approx(expected, rel=0, abs=1e-9)


@pytest.mark.parametrize(("name", "every", "steps"), [("every step", 1, 10), ("every five", 5, 50)])
def test_every_step_is_that_of_the_reference(ranks: list[Any], name: str, every: int, steps: int) -> None:
    expected = reference()
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9) for optimizer in expected.optimizers]
    for step in range(steps):
        batches = [batch(rank, step) for rank in range(3)]
        losses = [float(loss(model(x), y).detach()) for model, (x, y) in zip(expected.replicas, batches, strict=True)]
        mean = sum(n * value for n, value in zip(SIZES, losses, strict=True)) / sum(SIZES)
        expected.step(batches, loss)
        if (step + 1) % every == 0:
            expected.exchange()
        for schedule in schedules:
            schedule.step()
        for rank, model in enumerate(expected.replicas):
            close(ranks[rank][name]["steps"][step], values(model))
            assert ranks[rank][name]["losses"][step] == pytest.approx(mean, abs=1e-6)  # Lightning keeps float32
    assert {rank[name]["world"] for rank in ranks} == {3}
    assert ranks[0][name]["end"] == ranks[1][name]["end"] == ranks[2][name]["end"]


def test_overlapped_coded_exchanges_with_an_outer_optimizer_end_in_one_network(ranks: list[Any]) -> None:
    ends = [rank["overlapped"]["end"] for rank in ranks]
    assert ends[0] == ends[1] == ends[2]
    assert ranks[0]["overlapped"]["steps"][7] != ranks[2]["overlapped"]["steps"][7]


def test_accumulated_and_clipped_gradients(ranks: list[Any]) -> None:
    expected = reference()
    expected.clip = 0.5
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9) for optimizer in expected.optimizers]
    for step in range(6):
        pairs = [(batch(rank, 2 * step), batch(rank, 2 * step + 1)) for rank in range(3)]
        expected.step([tuple(torch.cat(both) for both in zip(*pair, strict=True)) for pair in pairs], loss)
        if step % 2:
            expected.exchange()
        for schedule in schedules:
            schedule.step()
        for rank, model in enumerate(expected.replicas):
            close(ranks[rank]["accumulated"]["steps"][step], values(model))
    assert ranks[0]["accumulated"]["global_step"] == 6


@pytest.mark.parametrize("name", ["resumed", "resumed overlapped"])
def test_a_resumed_run_goes_on_as_one_without_a_stop(ranks: list[Any], name: str) -> None:
    for rank in ranks:
        assert rank[name]["resumed"] == rank[name]["whole"] != []
        assert rank[name]["ends"][0] == rank[name]["ends"][1] == ranks[0][name]["ends"][0]
        assert rank[name]["vals"][0] == rank[name]["vals"][1] == pytest.approx(rank[name]["tested"], rel=0.2)
        assert rank[name]["step"] == 14
    assert {f"{name}.nodes" for name in ranks[0][name]["files"] if name.endswith("ckpt")} < set(ranks[0][name]["files"])
    assert len(ranks[0][name]["states"]) == 1  # of the newest checkpoint only


def test_validation_and_checkpoints_are_of_the_average(ranks: list[Any]) -> None:
    """After 7 steps, of which the last two came after an exchange, so that weights are equal to the batches' sizes."""
    before = [torch.tensor(rank["resumed"]["before"], dtype=torch.float64) for rank in ranks]
    mean = ((SIZES[0] + SIZES[1]) * before[0] + SIZES[2] * before[2]) / sum(SIZES)
    assert not torch.equal(before[0], before[2])
    for rank in ranks:
        assert len(rank["resumed"]["validated"]) == 2
        assert not rank["resumed"]["validated_with_gradients"]
        for seen in (*rank["resumed"]["validated"], rank["resumed"]["saved"]):
            close(seen, mean.tolist())


def test_steps_that_a_scaler_skips_count_on_all_nodes(ranks: list[Any]) -> None:
    ends = [rank["scaled"]["end"] for rank in ranks]
    assert ends[0] == ends[1] == ends[2]
    assert all(rank["scaled"]["moved"] and torch.tensor(rank["scaled"]["end"]).isfinite().all() for rank in ranks)
    assert {rank["scaled"]["counted"] for rank in ranks} == {39}  # before the last step


def test_two_networks_optimized_by_hand(ranks: list[Any]) -> None:
    maker, judge = (reference(part) for part in gan_networks())
    for step in range(10):
        batches = [batch(rank, step) for rank in range(3)]
        _step(judge, [judge_loss(judge.replicas[r], maker.replicas[r], x, y) for r, (x, y) in enumerate(batches)])
        if (step + 1) % 3 == 0:
            judge.exchange()
        _step(maker, [maker_loss(judge.replicas[r], maker.replicas[r], x) for r, (x, _) in enumerate(batches)])
        if (step + 1) % 3 == 0:
            maker.exchange()
        for rank in range(3):
            expected = values(maker.replicas[rank]) + values(judge.replicas[rank])
            close(ranks[rank]["by hand"]["steps"][step], expected)
    ends = [rank["by hand"]["end"] for rank in ranks]
    assert ends[0] == ends[1] == ends[2] != ranks[0]["by hand"]["steps"][-1]


def _step(network: Reference, losses: Sequence[torch.Tensor]) -> None:
    for replica, optimizer, rank_loss in zip(network.replicas, network.optimizers, losses, strict=True):
        optimizer.zero_grad()
        gradients = torch.autograd.grad(rank_loss, list(replica.parameters()))
        for parameter, gradient in zip(replica.parameters(), gradients, strict=True):
            parameter.grad = gradient
    for members in network.nodes:
        network.average_gradients(members, [SIZES[rank] for rank in members])
    for rank, optimizer in enumerate(network.optimizers):
        optimizer.step()
        network.samples[rank] += SIZES[rank]


def test_all_ranks_stop_early_at_the_same_epoch(ranks: list[Any]) -> None:
    assert {rank["stopped"]["epochs"] for rank in ranks} == {3}
    vals = ranks[0]["stopped"]["vals"]
    assert all(later < earlier for earlier, later in pairwise(vals))
    assert all(rank["stopped"]["vals"] == vals for rank in ranks)  # of different batches, weighted by their samples
    ends = [rank["stopped"]["end"] for rank in ranks]
    assert ends[0] == ends[1] == ends[2]


def test_unequal_batches_of_a_feed_are_one_batch(ranks: list[Any]) -> None:
    """The batches of all ranks together are those that one device trains with, also where a rank's is empty."""
    model = copy.deepcopy(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = (torch.cat(parts) for parts in zip(*batches_of(0, 7), strict=True))
    for step, (own_x, own_y) in enumerate(zip(x.split(sum(SIZES)), y.split(sum(SIZES)), strict=True)):
        optimizer.zero_grad()
        loss(model(own_x), own_y).backward()
        optimizer.step()
        for rank in ranks:
            close(rank["fed"]["steps"][step], values(model))


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("seconds", "every='30s' was asked for under Lightning's Trainer"),
        ("misfit", "exchanges overlap with 5 steps, but a new one begins after 2"),
        ("sync_batchnorm", "sends the statistics of every layer to all nodes"),
        ("averaging", "StochasticWeightAveraging averages the weights that one node has"),
        ("mixed", "whose parameters are not those of one module"),
        ("missing", r"ranks \[0, 1, 2\] do not see the states of the nodes"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(ranks: list[Any], wish: str, words: str) -> None:
    assert all(re.search(words, rank["refused"][wish]) for rank in ranks), ranks[0]["refused"][wish]


def test_a_rank_that_fails_is_named_to_the_others(ranks: list[Any]) -> None:
    assert ranks[2]["failed"] == "ValueError: no such batch"
    for rank in ranks[:2]:
        assert re.search(r"PeerError: rank 2 on .* stopped: ValueError: no such batch", rank["failed"]), rank["failed"]
