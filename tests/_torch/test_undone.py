"""Whatever is changed in torch is as it was once its users have closed, and one user does not undo another's."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker

from evenly._torch.autograd import TENSOR_HOOKS, without_hooks
from evenly._torch.dataloader import outside_of_workers
from evenly._torch.modules import LOAD_HOOKS, add_load_hook, remove_load_hook
from evenly._torch.optimizers import global_step_hooks
from evenly._torch.scaler import watch_scaler
from evenly.comm import RankGroup
from evenly.errors import EvenlyError, SpecError
from evenly.graph import trace
from evenly.graph.reads import recording_reads
from evenly.graph.tracing_guards import intercepting_torch
from evenly.nodes import join_nodes
from evenly.shards import Sharded, shard_model
from evenly.shards.optim.probe import watch_optimizers
from evenly.spec import Exchange, period_of
from tests.ranks import cluster_of, run_ranks


def clipping() -> list[Any]:
    names = ("get_total_norm", "clip_grads_with_norm_")
    return [getattr(clip_grad, f"_{name}") for name in names] + [getattr(nn.utils, name) for name in names]


def ours() -> list[Any]:
    hooks = [hook for table in global_step_hooks() for hook in table.values()]
    return [hook for hook in hooks if hook.__module__.startswith("evenly.")]


@pytest.fixture
def plain() -> Iterator[list[Any]]:
    """Gives torch's own functions for clipping; networks that other tests left open are no longer watched."""
    gc.collect()
    for network in [thing for thing in gc.get_objects() if type(thing) is Sharded]:
        for act in network.on_close:
            act()
    watch_optimizers()()  # ends also for networks that were dropped without being closed
    assert ours() == []
    before = clipping()
    yield before
    assert clipping() == before
    assert ours() == []


def cut(rank_group: RankGroup) -> nn.Module:
    return shard_model(nn.Linear(6, 4), torch.ones(2, 6), rank_group=rank_group, shares=[1] * rank_group.size)


def test_the_last_cut_network_that_is_closed_takes_the_hooks_of_all_optimizers_out(plain: list[Any]) -> None:
    def act(rank_group: RankGroup) -> None:
        first, second = cut(rank_group), cut(rank_group)
        assert len(ours()) == 2
        assert not set(clipping()) & set(plain)
        first.close()
        first.close()
        optimizer = torch.optim.Adafactor(second.parameters())
        assert len(ours()) == 2
        second(torch.ones(2, 6)).sum().backward()
        with pytest.raises(SpecError, match="Adafactor"):
            optimizer.step()
        second.close()

    run_ranks(2, act)
    for _ in range(2):  # and once more from the start
        assert clipping() == plain
        assert ours() == []
        run_ranks(2, act)


def test_a_network_that_fails_to_be_cut_leaves_nothing(plain: list[Any]) -> None:
    def act(rank_group: RankGroup) -> None:
        with pytest.raises(EvenlyError):
            shard_model(nn.Linear(6, 4 + rank_group.rank), torch.ones(2, 6), rank_group=rank_group, shares=[1, 1])

    run_ranks(2, act)


def attributes() -> dict[str, Any]:
    from torch._functorch import utils as functorch

    return {
        "set": nn.Module.__setattr__,
        "get": vars(nn.Module).get("__getattribute__"),
        "apply": vars(torch.autograd.Function)["apply"],
        "hook": torch.Tensor.register_hook,
        "ask": torch.is_grad_enabled,
        "enter": functorch.unwrap_dead_wrappers,
    }


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no")


@pytest.mark.parametrize("model", [nn.Linear(4, 2), Failing()])
def test_tracing_leaves_torch_as_it_was(model: nn.Module) -> None:
    before = attributes()
    try:
        trace(model, torch.ones(2, 4))
    except EvenlyError:
        assert isinstance(model, Failing)
    assert attributes() == before


def test_a_trace_inside_of_a_trace_leaves_the_outer_one() -> None:
    before = attributes()
    with intercepting_torch(), recording_reads(nn.Linear(2, 2)):
        outer = attributes()
        assert all(outer[name] is not before[name] for name in before)
        with intercepting_torch(), recording_reads(nn.Linear(2, 2)):
            assert all(attributes()[name] is not outer[name] for name in before)
        assert attributes() == outer
    assert attributes() == before


def test_tracing_gives_a_forward_of_the_instance_back() -> None:
    model = nn.Linear(4, 2)
    model.forward = lambda x: x * 2  # type: ignore[method-assign]
    own = model.forward
    trace(model, torch.ones(2, 4))
    assert type(model) is nn.Linear
    assert model.forward is own


def test_a_worker_is_told_who_it_is_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: Any = object()
    monkeypatch.setattr(worker, "_worker_info", told)
    first, second = outside_of_workers(), outside_of_workers()
    first.__enter__()
    second.__enter__()
    assert get_worker_info() is None
    first.__exit__(None, None, None)  # threads may end in any order
    assert get_worker_info() is None
    second.__exit__(None, None, None)
    assert get_worker_info() is told


def scaler_and_optimizer() -> tuple[torch.amp.GradScaler, torch.optim.Optimizer]:
    return torch.amp.GradScaler("cpu"), torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_scaler_that_two_watch_is_torchs_own_behind_the_last(order: tuple[int, int]) -> None:
    scaler, optimizer = scaler_and_optimizer()
    skips: list[int] = []

    def watch(number: int) -> Callable[[], None]:
        return watch_scaler(scaler, optimizer, steps=lambda: 0, on_skip=lambda: skips.append(number))

    ends = [watch(0), watch(1)]
    parameter = optimizer.param_groups[0]["params"][0]

    def step() -> None:
        parameter.grad = torch.full_like(parameter, float("inf"))
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()

    step()
    assert skips == [0, 1]
    ends[order[0]]()
    step()
    assert skips == [0, 1, order[1]]
    ends[order[1]]()
    assert "step" not in vars(scaler)
    step()
    assert len(skips) == 3


def test_a_step_that_somebody_else_has_put_there_stays() -> None:
    scaler, optimizer = scaler_and_optimizer()
    theirs: Any = lambda *args: None  # noqa: E731
    scaler.step = theirs  # type: ignore[method-assign]
    end = watch_scaler(scaler, optimizer, steps=lambda: 0, on_skip=lambda: None)
    assert scaler.step is not theirs
    end()
    assert scaler.step is theirs


def test_closing_a_synchronized_network_lets_go_of_everything() -> None:
    def act(rank_group: RankGroup) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        counts = _hooks(model)
        settings = {"period": period_of(2), "exchange": Exchange(), "scaler": scaler}
        synchronized = join_nodes(model, optimizer, rank_group=rank_group, cluster=cluster_of([[0, 1]]), **settings)
        scaler.scale(synchronized(torch.ones(4, 3)).sum()).backward()
        assert "step" in vars(scaler)
        assert _hooks(model) != counts
        scaler.step(optimizer)
        scaler.update()
        synchronized.finish()
        synchronized.close()
        assert "step" not in vars(scaler)
        assert _hooks(model) == counts
        optimizer.zero_grad()
        model(torch.full((4, 3), float(rank_group.rank))).sum().backward()  # nobody waits for the other rank

    run_ranks(2, act)


def _hooks(model: nn.Module) -> list[int]:
    return [len(getattr(part, kind)) for part in model.modules() for kind in LOAD_HOOKS]


def test_load_hooks_of_two_users_do_not_disturb_each_other() -> None:
    module = nn.Linear(2, 2)
    sheet = copy.copy(module)  # a shallow copy, as layers of cut networks are
    seen: list[str] = []

    class Hook:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, *args: Any) -> None:
            seen.append(self.name)

    one, other, of_copy = Hook("one"), Hook("other"), Hook("copy")
    add_load_hook(module, one)
    add_load_hook(module, other)
    add_load_hook(sheet, of_copy)
    remove_load_hook(module, one)
    module.load_state_dict(module.state_dict())
    assert seen == ["other", "other"]  # before and after
    remove_load_hook(module, other)
    remove_load_hook(module, other)
    module.load_state_dict(module.state_dict())
    assert len(seen) == 2


def test_gradient_hooks_are_the_same_behind_a_block_without_them() -> None:
    parameter, seen = nn.Parameter(torch.ones(2)), []
    parameter.register_hook(lambda grad: seen.append("before"))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    held = [dict(getattr(parameter, name)) for name in TENSOR_HOOKS]

    def fail() -> None:
        parameter.sum().backward()
        raise KeyError

    with pytest.raises(KeyError), without_hooks([parameter]):
        fail()
    assert seen == []
    assert [dict(getattr(parameter, name)) for name in TENSOR_HOOKS] == held
    parameter.sum().backward()
    assert seen == ["before", "after"]
