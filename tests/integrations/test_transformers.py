"""transformers' Trainer on two unequal nodes: each step is that of the reference; a resumed run goes on as it was."""

import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.integrations.batches import close
from tests.integrations.once import ranks_of
from tests.integrations.tokens import BATCH, IGNORED, rank_rows, reference_steps, rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("transformers") is None, reason="transformers is not installed: pip install transformers"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # while transformers is imported
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of three processes saw in all programs."""
    return ranks_of("transformers", tmp_path_factory)


@pytest.mark.parametrize(
    ("name", "every", "steps", "batches"),
    [("every step", 1, 10, 1), ("every five", 5, 50, 1), ("accumulated", 2, 6, 2)],
)
def test_every_step_is_that_of_the_reference(ranks: list[Any], name: str, every: int, steps: int, batches: int) -> None:
    """GPT-2, whose loss is a mean over tokens: batches of equal size have unequal numbers of these."""
    for step, expected in enumerate(reference_steps(every, steps, rows(60), batches=batches)):
        for rank in range(3):
            close(ranks[rank][name]["steps"][step], expected[rank])
    ends = [rank[name]["end"] for rank in ranks]
    assert ends[0] == ends[1] == ends[2]
    assert all(rank[name]["is_plain"] for rank in ranks)


@pytest.mark.parametrize("name", ["resumed", "resumed overlapped"])
def test_a_resumed_run_goes_on_as_one_without_a_stop(ranks: list[Any], name: str) -> None:
    for rank in ranks:
        assert rank[name]["resumed"] == rank[name]["whole"] != []
        assert rank[name]["last evaluated"][0] == rank[name]["last evaluated"][1] == ranks[0][name]["last evaluated"][0]
        assert rank[name]["losses"][0] == rank[name]["losses"][1] != []
    assert {"model.safetensors", "nodes", "optimizer.pt", "trainer_state.json"} < set(ranks[0][name]["files"])


def test_checkpoints_are_of_the_average(ranks: list[Any]) -> None:
    """After 7 steps, the last two of which came after an exchange: nodes count by their tokens in these."""
    data = rows(60)
    tokens = [0, 0]
    for step in (5, 6):
        for rank in range(3):
            labels = torch.stack([row["labels"] for row in rank_rows(data, step, rank)])[:, 1:]
            assert len(labels) == BATCH
            tokens[rank // 2] += int(labels.ne(IGNORED).sum())
    assert tokens[0] != 2 * tokens[1]
    first, second = (torch.tensor(ranks[rank]["resumed"]["before"], dtype=torch.float64) for rank in (0, 2))
    assert not torch.equal(first, second)
    mean = (tokens[0] * first + tokens[1] * second) / sum(tokens)
    for rank in ranks:
        close(rank["resumed"]["saved"], mean.tolist())


@pytest.mark.parametrize("name", ["resumed", "resumed overlapped"])
def test_the_best_model_is_there_at_the_end_and_is_saved(ranks: list[Any], name: str) -> None:
    first = ranks[0][name]["ends"][0]
    assert all(end == first for rank in ranks for end in rank[name]["ends"])


def test_old_checkpoints_are_removed_and_a_trainer_may_train_again(ranks: list[Any]) -> None:
    assert ranks[0]["rotated"] == ["checkpoint-20"]
    assert all(len(rank["again"]) == 6 for rank in ranks)
    assert ranks[0]["again"][2] != ranks[2]["again"][2]


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("seconds", "every='30s' was asked for under transformers' Trainer"),
        ("batch size", "auto_find_batch_size=True was asked for"),
        ("even_batches", "ranks would make unequal numbers of steps"),
    ],
)
def test_what_cannot_be_is_refused(ranks: list[Any], wish: str, words: str) -> None:
    assert all(re.search(words, rank["refused"][wish]) for rank in ranks), ranks[0]["refused"][wish]


def test_a_rank_that_fails_is_named_to_the_others(ranks: list[Any]) -> None:
    assert ranks[2]["failed"] == "ValueError: no such batch"
    for rank in ranks[:2]:
        assert re.search(r"PeerError: rank 2 on .* stopped: ValueError: no such batch", rank["failed"]), rank["failed"]
