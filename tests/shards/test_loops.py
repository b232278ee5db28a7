"""What people do with a network in their loops, done with a cut one: the same outputs, gradients and buffers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenly.comm import RankGroup
from evenly.graph import Traced, trace_module
from evenly.layouts import TransferCosts, lay_out
from evenly.shards import join_shards, local_shard_of
from evenly.spec.layout import Layout
from tests.ranks import run_ranks

X = torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.frozen = nn.Conv2d(8, 6, 3).requires_grad_(False)
        self.one = nn.Sequential(nn.GroupNorm(1, 6), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.Flatten(), nn.Linear(64, 3))
        self.two = nn.Conv2d(6, 2, 1)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.frozen(self.stem(x))
        return self.one(y), self.two(y)


LOOPS: dict[str, Callable[[nn.Module], list[Tensor]]] = {}


def loop(act: Callable[[nn.Module], list[Tensor]]) -> Callable[[nn.Module], list[Tensor]]:
    LOOPS[act.__name__] = act
    return act


def loss(outputs: Any) -> Tensor:
    return sum((output.square().sum() for output in outputs), torch.zeros(()))


@loop
def gradients_are_accumulated(model: nn.Module) -> list[Tensor]:
    outputs = [model(X + number) for number in range(3)]
    for output in outputs:
        loss(output).backward()
    return [head for output in outputs for head in output]


@loop
def one_loss_of_two_passes(model: nn.Module) -> list[Tensor]:
    (a, b), (c, d) = model(X), model(2 * X)
    ((a * c).sum() + (b - d).square().mean()).backward()
    return [a, b, c, d]


@loop
def a_loss_of_the_first_head_only(model: nn.Module) -> list[Tensor]:
    one, two = model(X)
    one.sum().backward()
    return [one, two]


@loop
def a_loss_of_the_second_head_only(model: nn.Module) -> list[Tensor]:
    one, two = model(X)
    two[:, :1].sum().backward()
    return [one, two]


@loop
def a_loss_for_each_head(model: nn.Module) -> list[Tensor]:
    one, two = model(X)
    one.sum().backward(retain_graph=True)
    two.square().sum().backward()
    return [one, two]


@loop
def a_pass_without_gradients_before(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        before = model(X)
    after = model(X)
    loss(after).backward()
    return [*before, *after]


@loop
def gradients_are_asked_for_by_hand(model: nn.Module) -> list[Tensor]:
    outputs = model(X)
    asked = [parameter for name, parameter in model.named_parameters() if "stem" in name]
    for parameter, gradient in zip(asked, torch.autograd.grad(loss(outputs), asked), strict=True):
        parameter.grad = gradient
    return list(outputs)


@loop
def a_norm_stays_in_evaluation(model: nn.Module) -> list[Tensor]:
    model.train()
    model.get_submodule("stem.1").eval()
    outputs = model(X)
    loss(outputs).backward()
    return list(outputs)


@loop
def it_is_trained_in_evaluation(model: nn.Module) -> list[Tensor]:
    outputs = model.eval()(X[:1])
    loss(outputs).backward()
    return list(outputs)


@loop
def a_layer_is_frozen_later(model: nn.Module) -> list[Tensor]:
    model.get_submodule("stem").requires_grad_(False)
    outputs = model(X)
    loss(outputs).backward()
    return list(outputs)


@loop
def a_layer_is_freed_later(model: nn.Module) -> list[Tensor]:
    model.requires_grad_(True)
    outputs = model(torch.cat([X, X]))
    loss(outputs).backward()
    return list(outputs)


@loop
def the_input_wants_a_gradient_later(model: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    outputs = model(x)
    loss(outputs).backward()
    assert x.grad is not None
    return [*outputs, x.grad]


@loop
def it_only_infers(model: nn.Module) -> list[Tensor]:
    with torch.inference_mode():
        return [output.clone() for output in model.eval()(X)]


def together(rank_group: RankGroup, traced: Traced, layout: Layout, name: str) -> dict[str, Tensor | None]:
    model = join_shards(traced, layout, rank_group=rank_group, timeout_s=60)
    try:
        return told(model, LOOPS[name](model), lambda own, tensor: local_shard_of(own).full(tensor))
    except BaseException as error:
        model.shard_group.monitor.report(error)
        raise
    finally:
        model.close()


def told(model: nn.Module, outputs: list[Tensor], whole: Callable[[Any, Tensor], Tensor]) -> dict[str, Tensor | None]:
    """Returns outputs, gradients and buffers by name."""
    grads = {name: p.grad if p.grad is None else whole(p, p.grad) for name, p in model.named_parameters()}
    buffers = {name: whole(buffer, buffer) for name, buffer in model.named_buffers()}
    return {f"output {i}": output.detach() for i, output in enumerate(outputs)} | grads | buffers


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param(TransferCosts(), id="dear"),
        pytest.param(TransferCosts(0.0, 0.0), id="free", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_does_the_same(name: str, rates: TransferCosts) -> None:
    torch.manual_seed(0)
    model = TwoHeads().double()
    traced = trace_module(model, X)
    results = run_ranks(3, together, traced, lay_out(traced.graph, [5, 3, 1], rates=rates), name)
    truth = told(model, LOOPS[name](model), lambda _, tensor: tensor.detach().clone())
    for found in results:
        assert found.keys() == truth.keys()
        for key, tensor in truth.items():
            assert (found[key] is None) == (tensor is None), key
            if tensor is not None:
                torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}")
