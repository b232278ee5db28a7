"""Loops with Fabric on two unequal nodes: each step is that of the reference; a resumed run goes on as it was."""

import re
from importlib.util import find_spec
from typing import Any

import pytest

from tests.integrations.batches import (
    accumulated_steps,
    average_of,
    close,
    fed_steps,
    gan_steps,
    reference_steps,
)
from tests.integrations.once import ranks_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed: pip install lightning"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of three processes saw in all programs; those with the Trainer run in the same ones."""
    return [rank["fabric"] for rank in ranks_of("lightning", tmp_path_factory)]


@pytest.mark.parametrize(("name", "every", "steps"), [("every step", 1, 10), ("every five", 5, 50)])
def test_every_step_is_that_of_the_reference(ranks: list[Any], name: str, every: int, steps: int) -> None:
    for step, expected in enumerate(reference_steps(every, steps)):
        for rank in range(3):
            close(ranks[rank][name]["steps"][step], expected[rank])
    ends = [rank[name]["end"] for rank in ranks]
    assert ends[0] == ends[1] == ends[2]
    assert {rank[name]["world"] for rank in ranks} == {3}


def test_accumulated_and_clipped_gradients(ranks: list[Any]) -> None:
    for step, expected in enumerate(accumulated_steps(2, 6, clip=0.5)):
        for rank in range(3):
            close(ranks[rank]["accumulated"][step], expected[rank])


@pytest.mark.parametrize("name", ["resumed", "resumed overlapped"])
def test_a_resumed_run_goes_on_as_one_without_a_stop(ranks: list[Any], name: str) -> None:
    for rank in ranks:
        assert rank[name]["resumed"] == rank[name]["whole"] != []
        assert rank[name]["ends"] == [ranks[0][name]["ends"][0]] * 2
        assert rank[name]["rest"] == {"epoch": 3}
    assert ranks[0][name]["files"] == ["state.ckpt", "state.ckpt.nodes"]


def test_what_is_saved_and_evaluated_is_the_average(ranks: list[Any]) -> None:
    """After 7 steps, of which the last two came after an exchange, so that weights are equal to the batches' sizes."""
    mean = average_of([rank["resumed"]["before"] for rank in ranks])
    for rank in ranks:
        for seen in rank["resumed"]["averages"]:
            close(seen, mean)


def test_two_networks(ranks: list[Any]) -> None:
    for step, expected in enumerate(gan_steps(3, 7)):
        for rank in range(3):
            close(ranks[rank]["by hand"][step], expected[rank])


def test_nodes_exchange_at_the_end_of_epochs_of_a_divided_loader(ranks: list[Any]) -> None:
    assert {rank["epochs"]["batches"] for rank in ranks} == {2}  # of 8 samples for each rank
    for epoch in range(2):
        ends = [rank["epochs"]["ends"][epoch] for rank in ranks]
        assert ends[0] == ends[1] == ends[2]
    assert ranks[0]["epochs"]["end"] == ranks[0]["epochs"]["ends"][-1]


def test_unequal_batches_of_a_feed_are_one_batch(ranks: list[Any]) -> None:
    for step, expected in enumerate(fed_steps()):
        for rank in ranks:
            close(rank["fed"][step], expected)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("seconds", "every='30s' was asked for under Fabric"),
        ("optimizers", "with 2 optimizers for one network"),
        ("module", "a network that trains and no optimizer"),
        ("optimizer", "with a SGD alone"),
        ("frozen", "nothing was raised"),
    ],
)
def test_what_cannot_be_is_refused(ranks: list[Any], wish: str, words: str) -> None:
    assert all(re.search(words, rank["refused"][wish]) for rank in ranks), ranks[0]["refused"][wish]
