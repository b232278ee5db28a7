"""Loops with Accelerate on two unequal nodes: each step is that of the reference; a resumed run goes on as it was."""

import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.integrations.batches import (
    NODES,
    accumulated_steps,
    average_of,
    batches_of,
    close,
    fed_steps,
    gan_steps,
    network,
    put,
    reference_steps,
    values,
)
from tests.integrations.once import ranks_of
from tests.reference import Reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed: pip install accelerate"),
]
loss = torch.nn.functional.mse_loss


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of three processes saw in all programs."""
    return ranks_of("accelerate", tmp_path_factory)


@pytest.mark.parametrize(("name", "every", "steps"), [("every step", 1, 10), ("every five", 5, 50)])
def test_every_step_is_that_of_the_reference(ranks: list[Any], name: str, every: int, steps: int) -> None:
    for step, expected in enumerate(reference_steps(every, steps)):
        for rank in range(3):
            close(ranks[rank][name]["steps"][step], expected[rank])
    ends = [rank[name]["end"] for rank in ranks]
    assert ends[0] == ends[1] == ends[2]
    assert [rank[name]["rate"] for rank in ranks] == pytest.approx([0.01 * 0.9 ** (steps // 3)] * 3)


def test_accumulated_and_clipped_gradients(ranks: list[Any]) -> None:
    for step, expected in enumerate(accumulated_steps(2, 6, clip=0.5)):
        for rank in range(3):
            close(ranks[rank]["accumulated"][step], expected[rank])


def test_its_own_small_model_with_a_divided_loader(ranks: list[Any]) -> None:
    from accelerate.test_utils.training import RegressionDataset

    data = RegressionDataset(length=60, seed=0)
    x, y = (torch.tensor([float(data[i][key]) for i in range(60)], dtype=torch.float64) for key in ("x", "y"))
    parts = list(zip(x.split(4), y.split(4), strict=True))
    expected = Reference(Line(), lambda model: torch.optim.SGD(model.parameters(), lr=0.05), NODES)
    for step in range(50):
        first = 3 * (step % 5)
        expected.step(parts[first : first + 3], loss)
        if (step + 1) % 5 == 0:
            expected.exchange()
        for rank, model in enumerate(expected.replicas):
            close(ranks[rank]["regression"]["steps"][step], values(model))
    assert ranks[0]["regression"]["end"] == ranks[2]["regression"]["end"]


class Line(torch.nn.Module):
    """RegressionModel, which prints."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * x + self.b


@pytest.mark.parametrize("name", ["resumed", "resumed overlapped"])
def test_a_resumed_run_goes_on_as_one_without_a_stop(ranks: list[Any], name: str) -> None:
    for rank in ranks:
        assert rank[name]["resumed"] == [rank[name]["whole"]] * 2 != [[], []]
        assert rank[name]["ends"] == [ranks[0][name]["ends"][0]] * 3
    assert {"model.safetensors", "nodes", "optimizer.bin", "scheduler.bin"} < set(ranks[0][name]["files"])
    assert ranks[0][name]["states"] == ["step-000000007"]


def test_what_is_saved_and_evaluated_is_the_average(ranks: list[Any]) -> None:
    """After 7 steps, of which the last two came after an exchange, so that weights are equal to the batches' sizes."""
    mean = average_of([rank["resumed"]["before"] for rank in ranks])
    for rank in ranks:
        for seen in rank["resumed"]["averages"]:
            close(seen, mean)


def test_metrics_of_a_divided_loader_have_every_sample_once(ranks: list[Any]) -> None:
    model = network()
    put(ranks[0]["measured"]["average"], model)
    expected = model(torch.cat([x for x, _ in batches_of(0, 3)])[:10]).detach()
    for rank in ranks:
        torch.testing.assert_close(torch.tensor(rank["measured"]["outputs"], dtype=torch.float64), expected)


def test_two_models_on_one_accelerator(ranks: list[Any]) -> None:
    for step, expected in enumerate(gan_steps(3, 7)):
        for rank in range(3):
            close(ranks[rank]["by hand"]["steps"][step], expected[rank])
    ends = [rank["by hand"]["end"] for rank in ranks]
    assert ends[0] == ends[1] == ends[2] != ranks[0]["by hand"]["steps"][-1]


def test_unequal_batches_of_a_feed_are_one_batch(ranks: list[Any]) -> None:
    for step, expected in enumerate(fed_steps()):
        for rank in ranks:
            close(rank["fed"][step], expected)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("seconds", "every='30s' was asked for under Accelerate"),
        ("even_batches", "ranks would make unequal numbers of steps"),
        ("comm_hook", "the communication hook 'bf16' for DDP, which is not used"),
        ("other", "given a Sequential beside model and optimizer"),
    ],
)
def test_what_cannot_be_is_refused(ranks: list[Any], wish: str, words: str) -> None:
    assert all(re.search(words, rank["refused"][wish]) for rank in ranks), ranks[0]["refused"][wish]
