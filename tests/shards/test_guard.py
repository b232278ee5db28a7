"""Between backward and step, gradients of cut parameters give what one device gives, or refuse by name."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_before

from evenly.comm import RankGroup
from evenly.errors import NonFiniteError, SpecError
from evenly.shards import GradScaler, clip_grad_norm_, local_shard_of, shard_model
from evenly.shards.parts.part_tensors import PartTensor
from tests.ranks import RankError, run_ranks

Act = Callable[[nn.Module, torch.optim.Optimizer], Any]
DATA = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3


def network() -> nn.Module:
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.LayerNorm(7), nn.Linear(7, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model


def train(model: nn.Module, act: Act, steps: int = 3) -> tuple[list[torch.Tensor], list[Any]]:
    """Returns the full parameters after some steps, and what `act` returned between each backward and step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    told = []
    for _ in range(steps):
        for part in DATA.split(3):  # accumulated
            model(part).square().mean().backward()
        told.append(act(model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
    return [_full(p) for p in model.parameters()], told


def _full(parameter: torch.Tensor) -> torch.Tensor:
    placement = local_shard_of(parameter)
    return parameter.detach().clone() if placement is None else placement.full(parameter)


def compare(act: Act, ranks: int = 2, ours: Act | None = None) -> None:
    """Trains on one device, and with `ours` on several; asserts the same numbers."""
    truth, told = train(network(), act)

    def on_rank(rank_group: RankGroup) -> tuple[list[torch.Tensor], list[Any]]:
        model = shard_model(network(), DATA, rank_group=rank_group, shares=[3, 1, 2][:ranks])
        assert any(p is not None and p.is_cut for p in map(local_shard_of, model.parameters()))
        try:
            return train(model, ours or act)
        finally:
            model.close()

    for found, said in run_ranks(ranks, on_rank):
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(said, told, rtol=1e-10, atol=1e-12)


def refused(act: Act, match: str) -> None:
    """Asserts that every rank raises."""

    def on_rank(rank_group: RankGroup) -> None:
        model = shard_model(network(), DATA, rank_group=rank_group, shares=[3, 1])
        try:
            with pytest.raises(SpecError, match=match):
                train(model, act)
        finally:
            model.close()

    run_ranks(2, on_rank)


CLIPPING: dict[str, Act] = {
    "norm": lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 0.5),
    "imported before": lambda m, _: imported_before(m.parameters(), 0.5),
    "of order 1": lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 0.5, 1.0),
    "largest": lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 0.5, math.inf),
    "without foreach": lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=False),
    "of one": lambda m, _: [nn.utils.clip_grad_norm_(p, 0.1) for p in m.parameters()],
    "two functions": lambda m, _: nn.utils.clip_grads_with_norm_(
        m.parameters(), 0.5, nn.utils.get_total_norm([p.grad for p in m.parameters()])
    ),
    "total": lambda m, _: nn.utils.get_total_norm([p.grad for p in m.parameters()]),
    "value": lambda m, _: nn.utils.clip_grad_value_(m.parameters(), 0.01),
}


@pytest.mark.parametrize("name", CLIPPING)
def test_torchs_clipping_gives_the_numbers_of_one_device(name: str) -> None:
    compare(CLIPPING[name], ranks=3 if name == "norm" else 2)


def _each(act: Callable[[torch.Tensor], Any]) -> Act:
    return lambda model, _: [act(p) for p in model.parameters()] and None


def assign(parameter: torch.Tensor) -> None:
    parameter.grad = parameter.grad * 0.5 + 0.01 * parameter.detach()


def assign_all(model: nn.Module) -> Any:
    parameters = list(model.parameters())
    for parameter, grad in zip(parameters, torch._foreach_mul([p.grad for p in parameters], 2.0), strict=True):
        parameter.grad = grad
    return nn.utils.clip_grad_norm_(parameters, 0.5)


ELEMENTWISE: dict[str, Act] = {
    "scaled": _each(lambda p: p.grad.mul_(0.5)),
    "scaled together": lambda m, _: torch._foreach_mul_([p.grad for p in m.parameters()], 0.5) and None,
    "decayed": _each(lambda p: p.grad.add_(p, alpha=0.1)),
    "through data": _each(lambda p: p.grad.data.add_(p.data, alpha=0.1)),
    "clamped": _each(lambda p: p.grad.clamp_(-0.01, 0.01)),
    "signs": _each(lambda p: p.grad.copy_(p.grad.sign())),
    "no NaN": _each(lambda p: torch.nan_to_num_(p.grad)),
    "small ones off": _each(lambda p: p.grad.masked_fill_(p.grad.abs() < 0.01, 0.0)),
    "chosen": _each(lambda p: p.grad.copy_(torch.where(p.grad > 0, p.grad, 2 * p.grad))),
    "assigned": _each(assign),
    "copied": _each(lambda p: setattr(p, "grad", copy.deepcopy(p.grad) * 2)),
    "assigned together": lambda m, _: assign_all(m),
    "zeroed": lambda m, o: o.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_treats_each_element_alone_works_as_ever(name: str) -> None:
    compare(ELEMENTWISE[name])


def by_hand(model: nn.Module, _: Any) -> None:
    total = sum(float(p.grad.pow(2).sum()) for p in model.parameters()) ** 0.5
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, 0.5 / total))


def flat(model: nn.Module, _: Any) -> None:
    torch.cat([p.grad.flatten() for p in model.parameters()]).norm()


def zero_row(model: nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        parameter.grad[0] = 0.0


def skip_if_bad(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if any(bool(torch.isnan(p.grad).any()) for p in model.parameters()):
        optimizer.zero_grad()


MIXING: dict[str, tuple[Act, str]] = {
    "by hand": (by_hand, "aten.sum"),
    "flat": (flat, r"aten.*norm"),
    "norm": (_each(lambda p: p.grad.norm()), r"norm.* was asked for on the gradient of '0.weight'"),
    "norm of data": (_each(lambda p: torch.linalg.vector_norm(p.grad.data)), "norm"),
    "norm of squares": (_each(lambda p: (p.grad * p.grad).mean()), "aten.mean"),
    "foreach": (lambda m, _: torch._foreach_norm([p.grad for p in m.parameters()]), "_foreach_norm"),
    "normalized": (_each(lambda p: nn.functional.normalize(p.grad, dim=0)), "norm"),
    "centered": (_each(lambda p: p.grad.sub_(p.grad.mean(0))), "aten.mean"),
    "row": (zero_row, "aten.select"),
    "decision": (skip_if_bad, "aten.any"),
    "noise": (_each(lambda p: p.grad.add_(torch.randn_like(p.grad))), "aten.randn_like"),
    "product": (_each(lambda p: torch.dot(p.grad.flatten(), p.grad.flatten())), "aten.dot"),
    "largest": (_each(lambda p: p.grad.abs().max()), "aten.max"),
    "momentum by hand": (_each(lambda p: torch.zeros_like(p).add_(p.grad).norm()), "norm"),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_looks_at_several_elements_is_refused(name: str) -> None:
    act, match = MIXING[name]
    refused(act, match + r"(.|\n)*cut over ranks(.|\n)*clip_grad_norm_")


class Sharp:
    """A wrapper that is no optimizer: it goes uphill by the norm of all gradients before it steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def climb(self) -> None:
        grads = [p.grad for group in self.inner.param_groups for p in group["params"]]
        torch.norm(torch.stack([grad.norm() for grad in grads]))


def test_a_wrapper_that_looks_at_gradients_is_refused() -> None:
    refused(lambda _, optimizer: Sharp(optimizer).climb(), "norm")


def test_the_whole_gradient_and_this_ranks_part_can_be_had() -> None:
    def whole(model: nn.Module, _: Any) -> list[Any]:
        grads = [local_shard_of(p).full(p.grad) for p in model.parameters()]
        parts = [p.grad.as_subclass(torch.Tensor).sum() for p in model.parameters()]
        assert len(parts) == len(grads)
        return [float(grad.norm()) for grad in grads]

    compare(lambda model, _: [float(p.grad.norm()) for p in model.parameters()], ours=whole)


def test_gradients_stay_guarded_after_a_step_and_step_plain() -> None:
    def on_rank(rank_group: RankGroup) -> None:
        model = shard_model(network(), DATA, rank_group=rank_group, shares=[3, 1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen: list[type] = []
        optimizer.register_step_pre_hook(lambda own, *_: seen.append(type(own.param_groups[0]["params"][0].grad)))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(DATA).square().mean()
            loss.backward()
            return loss

        for step in (optimizer.step, lambda: optimizer.step(closure)):
            closure()
            step()
            first = next(model.parameters())
            assert type(first.grad) is PartTensor
            assert type(optimizer.state[first]["momentum_buffer"]) is torch.Tensor
            with pytest.raises(SpecError, match="norm"):
                first.grad.norm()
        assert seen == [torch.Tensor] * 2
        assert "tensor(" in repr(first.grad)
        assert type(copy.deepcopy(first.grad)) is PartTensor
        model.close()

    run_ranks(2, on_rank)


def by_autograd(clip: Act) -> Act:
    """Has gradients come from autograd.grad, which leaves none behind."""

    def act(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        parameters = list(model.parameters())
        grads = torch.autograd.grad(model(DATA).square().mean(), parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        return clip(model, optimizer)

    return act


@pytest.mark.parametrize("clip", [CLIPPING["norm"], lambda m, _: clip_grad_norm_(m.parameters(), 0.5)])
def test_gradients_made_by_hand_are_clipped_by_the_norm_of_all(clip: Act) -> None:
    compare(by_autograd(CLIPPING["norm"]), ours=by_autograd(clip))


def test_torchs_scaler_is_refused_and_ours_is_not() -> None:
    def scaled(scaler: torch.amp.GradScaler) -> Act:
        def act(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
            scaler.update()

        return act

    refused(
        lambda m, o: scaled(torch.amp.GradScaler("cpu"))(m, o), r"non_finite_check(.|\n)*evenly\.shards\.GradScaler"
    )
    plain = lambda m, _: [p.grad.div_(4.0) for p in m.parameters()] and None  # noqa: E731
    compare(plain, ours=lambda m, o: scaled(GradScaler("cpu", init_scale=4.0))(m, o))


def test_a_norm_that_is_not_finite_raises_where_asked() -> None:
    def spoil(model: nn.Module, _: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.fill_(math.nan)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    def on_rank(rank_group: RankGroup) -> None:
        model = shard_model(network(), DATA, rank_group=rank_group, shares=[3, 1])
        try:
            train(model, spoil)
        finally:
            model.close()

    with pytest.raises(RankError) as caught:
        run_ranks(2, on_rank)
    assert all(isinstance(error, NonFiniteError) for error in caught.value.errors)
