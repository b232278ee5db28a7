"""Optimizers are tried with their hooks, attributes and wrappers: what looks at several elements is refused."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evenly.comm import FailureMonitor, RankGroup, ShardGroup, open_group
from evenly.errors import SpecError
from evenly.shards import Adafactor, Lamb, clip_grad_norm_
from evenly.shards.optim.probe import check_elementwise, watch_optimizers
from evenly.shards.parts.local_shards import LocalShard, set_local_shard

COUNTS = {"calls": 0}
Hook = Callable[[Any, Any, Any], None]


@pytest.fixture
def shard_group() -> Iterator[ShardGroup]:
    rank_group = RankGroup(0, 1, dist.HashStore())
    shard_group = ShardGroup(open_group(rank_group, "w", [0], backend="gloo", timeout_s=20), FailureMonitor(rank_group))
    yield shard_group
    shard_group.close()


def cut(shard_group: ShardGroup, shape: tuple[int, ...] = (6, 4), dim: int = 0) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(shape))
    set_local_shard(parameter, LocalShard("w", parameter.shape, shard_group, dim, (((0, shape[dim]),),)))
    parameter.grad = torch.ones(shape)
    return parameter


def held(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Limited(torch.optim.SGD):
    """Keeps its argument under another name, and limits the norm of every gradient by it."""

    def __init__(self, params: Any, lr: float = 0.1, max_norm: float | None = None) -> None:
        super().__init__(params, lr)
        self._bound = {"norm": max_norm}

    def step(self, closure: Any = None) -> Any:
        if self._bound["norm"] is not None:
            for parameter in held(self):
                parameter.grad.mul_(min(1.0, self._bound["norm"] / float(parameter.grad.norm())))
        return super().step(closure)


def clip_by_torch(optimizer: Any, args: Any, kwargs: Any) -> None:
    nn.utils.clip_grad_norm_(held(optimizer), 1.0)


def clip_if_huge(optimizer: Any, args: Any, kwargs: Any) -> None:
    nn.utils.clip_grad_norm_(held(optimizer), 1e6)


def lift_if_tiny(optimizer: Any, args: Any, kwargs: Any) -> None:
    for parameter in held(optimizer):
        norm = float(parameter.grad.norm())
        parameter.grad.mul_(10.0 if norm < 1e-5 else 1.0)


def center(optimizer: Any, args: Any, kwargs: Any) -> None:
    for parameter in held(optimizer):
        parameter.grad -= parameter.grad.mean()


def project(optimizer: Any, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for parameter in held(optimizer):
            parameter.div_(parameter.norm())


def limit_values(optimizer: Any, args: Any, kwargs: Any) -> None:
    COUNTS["calls"] += 1
    nn.utils.clip_grad_value_(held(optimizer), 0.5)


def limit_weights(optimizer: Any, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for parameter in held(optimizer):
            parameter.clamp_(-1.0, 1.0)


def clip_over_ranks(optimizer: Any, args: Any, kwargs: Any) -> None:
    clip_grad_norm_(held(optimizer), 1.0)


def test_an_argument_kept_under_another_name_counts(shard_group: ShardGroup) -> None:
    check_elementwise(Limited([cut(shard_group)]))
    with pytest.raises(SpecError, match=r"Limited.*not elementwise"):
        check_elementwise(Limited([cut(shard_group)], max_norm=1.0))


@pytest.mark.parametrize("hook", [clip_by_torch, clip_if_huge, lift_if_tiny, center])
@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.AdamW, Lamb, Adafactor])
def test_gradients_that_a_hook_clips_or_centers_are_refused(shard_group: ShardGroup, build: Any, hook: Hook) -> None:
    optimizer = build([cut(shard_group)], lr=0.1)
    check_elementwise(optimizer)
    handle = optimizer.register_step_pre_hook(hook)
    with pytest.raises(
        SpecError, match=rf"with the step hooks {hook.__name__} was asked.*not elementwise.*clip_grad_norm_"
    ):
        check_elementwise(optimizer)
    handle.remove()
    check_elementwise(optimizer)


def test_weights_that_a_hook_projects_are_refused(shard_group: ShardGroup) -> None:
    optimizer = torch.optim.Adam([cut(shard_group)], lr=0.1)
    optimizer.register_step_post_hook(project)
    with pytest.raises(SpecError, match="not elementwise"):
        check_elementwise(optimizer)


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.AdamW, Lamb])
def test_hooks_that_treat_each_element_alone_pass(shard_group: ShardGroup, build: Any) -> None:
    optimizer = build([cut(shard_group)], lr=0.1)
    seen, number = [], 0

    def count(*_: Any) -> None:
        nonlocal number
        number += 1
        seen.append(number)

    optimizer.register_step_pre_hook(limit_values)
    optimizer.register_step_pre_hook(clip_over_ranks)
    optimizer.register_step_post_hook(limit_weights)
    optimizer.register_step_post_hook(count)
    before = COUNTS["calls"]
    check_elementwise(optimizer)
    assert (seen, number, COUNTS["calls"]) == ([], 0, before)  # they have not noticed


def test_a_hook_that_reaches_for_the_network_is_refused(shard_group: ShardGroup) -> None:
    network = nn.Linear(4, 6, bias=False)
    network.weight = cut(shard_group)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    handle = optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(network.parameters(), 1.0) and None)
    with pytest.raises(SpecError, match="reaches for the network's own parameters"):
        check_elementwise(optimizer)
    assert type(network.weight) is nn.Parameter
    assert torch.equal(network.weight.grad, torch.ones(6, 4))
    handle.remove()
    optimizer.register_step_pre_hook(lambda *_: clip_grad_norm_(network.parameters(), 1.0) and None)
    check_elementwise(optimizer)
    assert torch.equal(network.weight.grad, torch.ones(6, 4))


def test_a_step_put_on_the_object_is_tried(shard_group: ShardGroup) -> None:
    optimizer = torch.optim.SGD([cut(shard_group)], lr=0.1)
    plain = optimizer.step

    def step(self: Any, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(held(self), 1.0)
        return plain(closure)

    optimizer.step = types.MethodType(step, optimizer)
    with pytest.raises(SpecError, match="not elementwise"):
        check_elementwise(optimizer)
    assert torch.equal(optimizer.param_groups[0]["params"][0].detach(), torch.ones(6, 4))
    scheduled = torch.optim.SGD([cut(shard_group)], lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 10)
    check_elementwise(scheduled)
    assert torch.equal(scheduled.param_groups[0]["params"][0].detach(), torch.ones(6, 4))
    exact = Lamb([cut(shard_group)], lr=0.1)
    torch.optim.lr_scheduler.StepLR(exact, 10)
    check_elementwise(exact)
    exact.step = optimizer.step
    with pytest.raises(SpecError, match="step was replaced"):
        check_elementwise(exact)


class Ahead(torch.optim.Optimizer):
    """A wrapper: every 5 steps the weights go back half the way to slow ones, which it keeps as they were at first."""

    def __init__(self, inner: torch.optim.Optimizer, *, normed: bool = False) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.normed, self.count = inner, normed, 0
        self.param_groups = inner.param_groups
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 5:
            return
        with torch.no_grad():
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for fast, old in zip(group["params"], slow, strict=True):
                    old.lerp_(fast / fast.norm() if self.normed else fast, 0.5)
                    fast.copy_(old)


def test_a_wrapper_is_tried_with_what_it_wraps(shard_group: ShardGroup) -> None:
    def parameters() -> list[nn.Parameter]:
        return [cut(shard_group), cut(shard_group, (3, 5)), cut(shard_group, (7,))]

    check_elementwise(Ahead(torch.optim.Adam(parameters())))
    check_elementwise(Ahead(Limited(parameters())))
    for inner in (torch.optim.Adafactor(parameters()), Limited(parameters(), max_norm=1.0)):
        with pytest.raises(SpecError, match=r"Ahead.*not elementwise"):
            check_elementwise(Ahead(inner))
    with pytest.raises(SpecError, match=r"Ahead.*not elementwise"):
        check_elementwise(Ahead(torch.optim.Adam(parameters()), normed=True))


def test_a_closure_is_given_where_the_step_has_one(shard_group: ShardGroup) -> None:
    class Sharp(torch.optim.SGD):
        """Asks for the gradient a little uphill, by the gradient's sign or its direction."""

        def __init__(self, params: Any, *, by_norm: bool) -> None:
            super().__init__(params, 0.1)
            self.by_norm = by_norm

        @torch.no_grad()
        def step(self, closure: Any) -> None:
            closure()
            for parameter in held(self):
                uphill = parameter.grad / parameter.grad.norm() if self.by_norm else parameter.grad.sign()
                parameter.add_(uphill, alpha=0.1)
            closure()
            super().step()

    def closure() -> float:
        raise AssertionError("it was called for a trial")

    check_elementwise(Sharp([cut(shard_group)], by_norm=False), (closure,))
    with pytest.raises(SpecError, match="not elementwise"):
        check_elementwise(Sharp([cut(shard_group)], by_norm=True), (closure,))
    with pytest.raises(SpecError, match=r"could not be tried out.*closure"):
        check_elementwise(Sharp([cut(shard_group)], by_norm=False))


@pytest.fixture
def watching() -> Iterator[None]:
    end = watch_optimizers()
    yield
    end()


@pytest.mark.usefixtures("watching")
def test_what_is_changed_after_the_first_step_is_tried_again(shard_group: ShardGroup) -> None:
    optimizer = torch.optim.SGD([cut(shard_group)], lr=0.1, momentum=0.9)
    optimizer.step()
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    handle = optimizer.register_step_pre_hook(clip_by_torch)
    for _ in range(2):
        with pytest.raises(SpecError, match="not elementwise"):
            optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0].detach(), before)
    handle.remove()
    optimizer.step()
    limited = Limited([cut(shard_group)])
    limited.step()
    limited.max_norm = None
    limited.__class__ = type("Other", (Limited,), {"step": lambda self: clip_by_torch(self, (), {})})
    with pytest.raises(SpecError, match="Other"):
        check_elementwise(limited)


def test_draws_are_refused_and_random_numbers_stay_as_they_are(shard_group: ShardGroup) -> None:
    def shake(optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in held(optimizer):
            parameter.grad.add_(torch.randn_like(parameter.grad))

    optimizer = torch.optim.SGD([cut(shard_group)], lr=0.1)
    optimizer.register_step_pre_hook(shake)
    before = torch.get_rng_state()
    with pytest.raises(SpecError, match="not elementwise"):
        check_elementwise(optimizer)
    assert torch.equal(torch.get_rng_state(), before)
