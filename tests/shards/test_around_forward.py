"""What torch offers around a forward: inference mode, activation checkpoints, hooks of saved tensors, autocast."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from evenly.comm import RankGroup
from evenly.graph import trace_module
from evenly.layouts import lay_out
from evenly.shards import join_shards, local_shard_of
from tests.ranks import run_ranks

X = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Recurrent(nn.Module):
    """A GRU before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 7, batch_first=True), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Plain(nn.Module):
    """Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


NETWORKS: list[tuple[Callable[[], nn.Module], str]] = [
    (Plain, ""),
    (Recurrent, "whole"),
    (Recurrent, "bystander"),
    (Recurrent, "units"),
]


def gradients_of(model: nn.Module, use: Callable[[nn.Module], Tensor]) -> tuple[Tensor, list[Tensor]]:
    for _ in range(2):
        model.zero_grad()
        loss = use(model)
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def compare(build: Callable[[], nn.Module], mode: str, use: Callable[[nn.Module], Tensor], shares: list[float]) -> None:
    torch.manual_seed(0)
    model = build().double()
    traced = trace_module(model, X)
    layout = lay_out(traced.graph, shares, modes={"recurrent": [mode]} if mode else {})

    def act(rank_group: RankGroup) -> tuple[Tensor, list[Tensor]]:
        sharded = join_shards(traced, layout, rank_group=rank_group, timeout_s=20)
        try:
            loss, gradients = gradients_of(sharded, use)
            shards = [local_shard_of(p) for p in sharded.parameters()]
            return loss, [shard.full(g) for shard, g in zip(shards, gradients, strict=True) if shard is not None]
        finally:
            sharded.close()

    results = run_ranks(len(shares), act)
    expected = gradients_of(model, use)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("build", "mode"), NETWORKS)
def test_checkpoints_and_hooks_of_saved_tensors(build: Callable[[], nn.Module], mode: str) -> None:
    def use(model: nn.Module) -> Tensor:
        x = X.clone().requires_grad_()
        first = checkpoint(model, x, use_reentrant=False)
        second = checkpoint(model, first * 0.5, use_reentrant=False)
        third = checkpoint(model, second, use_reentrant=True)
        with save_on_cpu():
            fourth = model(third)
        return fourth.square().mean()

    compare(build, mode, use, [5, 3, 1])


def test_inference_mode_before_and_after_training() -> None:
    def use(model: nn.Module) -> Tensor:
        model.eval()
        with torch.inference_mode():
            before = model(X[:3])
        model.train()
        loss = model(X).square().mean()
        model.eval()
        with torch.inference_mode():
            after = model(X[:2])
        model.train()
        return loss + float(before.sum() + after.sum())

    compare(Recurrent, "units", use, [2, 1])
    compare(Plain, "", use, [2, 1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
def test_outputs_under_autocast_have_the_dtypes_of_one_device(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(kind(6, 8, num_layers=2, batch_first=True)), X.float()
    traced = trace_module(model, x)
    layout = lay_out(traced.graph, [2, 1], modes={"recurrent": ["units"]})

    def outputs(network: nn.Module) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y, state = network(x)
            states = [state] if isinstance(state, Tensor) else list(state)
            sum(z.float().sum() for z in (y, *states)).backward()
        return [y, *states]

    def act(rank_group: RankGroup) -> list[Tensor]:
        sharded = join_shards(traced, layout, rank_group=rank_group, timeout_s=20)
        try:
            return [y.detach() for y in outputs(sharded)]
        finally:
            sharded.close()

    try:
        expected = outputs(model)
    except RuntimeError as error:
        pytest.skip(f"torch has no bfloat16 {kind.__name__} for this processor: {error}")
    for found in run_ranks(2, act):
        for ours, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=0.05, atol=0.05)  # also compares dtypes
