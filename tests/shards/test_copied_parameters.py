"""Layers cut along the batch: every rank has their whole parameters, whose gradients are summed all at once."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from evenly.comm import PendingTensor, RankGroup
from evenly.shards import Sharded, shard_model
from tests.ranks import run_ranks

SHARES = [3, 2, 1]
IMAGES = torch.randn(7, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Act = Callable[[nn.Module], Any]


class TwoHeads(nn.Module):
    """Convolutions of few weights, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 3, 3, padding=1)
        self.left = nn.Conv2d(3, 2, 3, padding=1)
        self.right = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.second(self.first(x).relu()).tanh()
        return self.left(h).mean((2, 3)), self.right(h).mean((2, 3))


torch.manual_seed(0)
NETWORK = TwoHeads().double()


def network() -> nn.Module:
    return copy.deepcopy(NETWORK)  # ranks are threads, with one generator of random numbers


def on_a_rank(act: Act, rank_group: RankGroup) -> tuple[Any, set[str]]:
    model = shard_model(network(), IMAGES, rank_group=rank_group, shares=SHARES, cut_batch=True, timeout_s=60.0)
    try:
        copied = {move.tensor for move in model.layout.moves if move.name == "copy"}
        return act(model), copied
    except BaseException as error:
        model.shard_group.monitor.report(error)
        raise
    finally:
        model.close()


def require_equal(act: Act, *, copies: int = 8) -> None:
    """`act` gives on every rank of a cut network what it gives on one device."""
    expected = act(network())
    for result, copied in run_ranks(len(SHARES), partial(on_a_rank, act)):
        assert len(copied) == copies  # otherwise the test tests nothing
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()
    }


def test_a_loss_of_one_output() -> None:
    def act(model: nn.Module) -> Any:
        model(IMAGES)[1].square().sum().backward()
        return gradients(model)

    require_equal(act)


@pytest.mark.parametrize("frozen", [["first.weight"], ["second.weight", "second.bias"], ["first.bias", "right.weight"]])
def test_frozen_parameters(frozen: list[str]) -> None:
    def act(model: nn.Module) -> Any:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        sum(output.square().sum() for output in model(IMAGES)).backward()
        before = gradients(model)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        sum(output.square().sum() for output in model(IMAGES)).backward()
        return before, gradients(model)

    require_equal(act)


def test_the_gradient_of_a_single_parameter() -> None:
    def act(model: nn.Module) -> Any:
        loss = sum(output.square().sum() for output in model(IMAGES))
        first, left = model.get_parameter("first.weight"), model.get_parameter("left.bias")
        return [torch.autograd.grad(loss, parameter, retain_graph=True)[0] for parameter in (left, first)]

    require_equal(act)


def test_gradients_of_gradients() -> None:
    def act(model: nn.Module) -> Any:
        loss = sum(output.square().sum() for output in model(IMAGES))
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(slope.square().sum() for slope in slopes).backward()
        return gradients(model)

    require_equal(act)


def test_several_backwards_and_forwards() -> None:
    def act(model: nn.Module) -> Any:
        left, right = model(IMAGES)
        left.square().sum().backward(retain_graph=True)
        right.square().sum().backward()
        with torch.no_grad():
            plain = model(IMAGES)[0]
        model(IMAGES[:4])[0].sum().backward()
        return plain, gradients(model)

    require_equal(act)


def test_ranks_wait_once_for_all_of_them() -> None:
    def act(model: nn.Module) -> Any:
        assert isinstance(model, Sharded)
        events: list[str] = []
        sum_over_ranks = model.shard_group.sum

        def logged_sum(x: torch.Tensor, *, name: str = "sum", largest: bool = False) -> PendingTensor:
            pending = sum_over_ranks(x, name=name, largest=largest)
            events.append("start")
            return PendingTensor(lambda: (events.append("wait"), pending.wait())[1])

        model.shard_group.sum = logged_sum  # type: ignore[method-assign]  # of this rank only
        sum(output.square().sum() for output in model(IMAGES)).backward()
        return events

    for events, _ in run_ranks(len(SHARES), partial(on_a_rank, act)):
        assert events == ["start"] * 8 + ["wait"] * 8
