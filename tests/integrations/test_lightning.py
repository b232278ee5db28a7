"""Lightning's Trainer on two unequal nodes: each step is that of the reference; a resumed run goes on as it was."""

import re
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.integrations.batches import (
    SIZES,
    accumulated_steps,
    average_of,
    batch,
    close,
    fed_steps,
    gan_steps,
    network,
    put,
    reference_steps,
)
from tests.integrations.once import ranks_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed: pip install lightning"),
]
loss = torch.nn.functional.mse_loss


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of three processes saw in all programs."""
    return ranks_of("lightning", tmp_path_factory)


@pytest.mark.parametrize(("name", "every", "steps"), [("every step", 1, 10), ("every five", 5, 50)])
def test_every_step_is_that_of_the_reference(ranks: list[Any], name: str, every: int, steps: int) -> None:
    models = [network() for _ in range(3)]
    for step, expected in enumerate(reference_steps(every, steps)):
        batches = [batch(rank, step) for rank in range(3)]
        losses = [loss(model(x), y).detach().item() for model, (x, y) in zip(models, batches, strict=True)]
        mean = sum(n * value for n, value in zip(SIZES, losses, strict=True)) / sum(SIZES)
        for rank, model in enumerate(models):
            close(ranks[rank][name]["steps"][step], expected[rank])
            assert ranks[rank][name]["losses"][step] == pytest.approx(mean, abs=1e-6)  # Lightning keeps float32
            put(expected[rank], model)
    assert {rank[name]["world"] for rank in ranks} == {3}
    assert ranks[0][name]["end"] == ranks[1][name]["end"] == ranks[2][name]["end"]


def test_overlapped_coded_exchanges_with_an_outer_optimizer_end_in_one_network(ranks: list[Any]) -> None:
    ends = [rank["overlapped"]["end"] for rank in ranks]
    assert ends[0] == ends[1] == ends[2]
    assert ranks[0]["overlapped"]["steps"][7] != ranks[2]["overlapped"]["steps"][7]


def test_accumulated_and_clipped_gradients(ranks: list[Any]) -> None:
    for step, expected in enumerate(accumulated_steps(2, 6, clip=0.5)):
        for rank in range(3):
            close(ranks[rank]["accumulated"]["steps"][step], expected[rank])
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


def test_a_checkpoint_without_states_of_nodes_is_gone_on_from(ranks: list[Any]) -> None:
    ends = [rank["from plain"]["ends"] for rank in ranks]
    assert ends[0] == ends[1] == ends[2]
    assert ends[0][0] != ends[0][1]
    assert {(rank["from plain"]["steps"], rank["from plain"]["global"]) for rank in ranks} == {(6.0, 6)}


def test_validation_and_checkpoints_are_of_the_average(ranks: list[Any]) -> None:
    """After 7 steps, of which the last two came after an exchange, so that weights are equal to the batches' sizes."""
    mean = average_of([rank["resumed"]["before"] for rank in ranks])
    for rank in ranks:
        assert len(rank["resumed"]["validated"]) == 2
        assert not rank["resumed"]["validated_with_gradients"]
        for seen in (*rank["resumed"]["validated"], rank["resumed"]["saved"]):
            close(seen, mean)


def test_steps_that_a_scaler_skips_count_on_all_nodes(ranks: list[Any]) -> None:
    ends = [rank["scaled"]["end"] for rank in ranks]
    assert ends[0] == ends[1] == ends[2]
    assert all(rank["scaled"]["moved"] and torch.tensor(rank["scaled"]["end"]).isfinite().all() for rank in ranks)
    assert {rank["scaled"]["counted"] for rank in ranks} == {39}  # before the last step


def test_two_networks_optimized_by_hand(ranks: list[Any]) -> None:
    for step, expected in enumerate(gan_steps(3, 10)):
        for rank in range(3):
            close(ranks[rank]["by hand"]["steps"][step], expected[rank])
    ends = [rank["by hand"]["end"] for rank in ranks]
    assert ends[0] == ends[1] == ends[2] != ranks[0]["by hand"]["steps"][-1]


def test_all_ranks_stop_early_at_the_same_epoch(ranks: list[Any]) -> None:
    assert {rank["stopped"]["epochs"] for rank in ranks} == {3}
    vals = ranks[0]["stopped"]["vals"]
    assert all(later < earlier for earlier, later in pairwise(vals))
    assert all(rank["stopped"]["vals"] == vals for rank in ranks)  # of different batches, weighted by their samples
    ends = [rank["stopped"]["end"] for rank in ranks]
    assert ends[0] == ends[1] == ends[2]


def test_unequal_batches_of_a_feed_are_one_batch(ranks: list[Any]) -> None:
    """The batches of all ranks together are those that one device trains with, also where a rank's is empty."""
    for step, expected in enumerate(fed_steps()):
        for rank in ranks:
            close(rank["fed"]["steps"][step], expected)


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
