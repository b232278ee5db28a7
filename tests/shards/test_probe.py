"""Optimizers that would give other numbers on cut parameters are found out by trying."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from evenly._torch.optimizers import global_step_hooks
from evenly.comm import FailureMonitor, RankGroup, ShardGroup, open_group
from evenly.errors import SpecError
from evenly.shards.optim import probe, trial_steps
from evenly.shards.optim.optimizers import Adafactor, Lamb
from evenly.shards.optim.probe import check_elementwise, watch_optimizers
from evenly.shards.parts.local_shards import LocalShard, set_local_shard

KINDS = [((6,), 0), ((6, 4), 0), ((6, 4), 1), ((6, 4, 3, 3), 0), ((6, 4, 3, 3), 1)]


@pytest.fixture
def shard_group() -> Iterator[ShardGroup]:
    rank_group = RankGroup(0, 1, dist.HashStore())
    shard_group = ShardGroup(open_group(rank_group, "w", [0], backend="gloo", timeout_s=20), FailureMonitor(rank_group))
    yield shard_group
    shard_group.close()


@pytest.fixture
def watching() -> Iterator[None]:
    """Puts the hooks in for a test, and takes them out after."""
    end = watch_optimizers()
    yield
    end()


def cut(shard_group: ShardGroup, shape: tuple[int, ...], dim: int | None) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(shape))
    segments = () if dim is None else (((0, shape[dim]),),)
    set_local_shard(parameter, LocalShard("w", parameter.shape, shard_group, dim, segments))
    parameter.grad = torch.ones(shape)
    return parameter


def cuts(shard_group: ShardGroup, kinds: list[tuple[tuple[int, ...], int]] = KINDS) -> list[torch.nn.Parameter]:
    return [cut(shard_group, shape, dim) for shape, dim in kinds]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.0}),  # as at the begin of a warmup
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "maximize": True, "foreach": True}),
        ("SGD", {"lr": 0.1, "fused": True}),
        ("Adam", {}),
        ("Adam", {"foreach": True, "weight_decay": 0.1}),
        ("Adam", {"fused": True, "amsgrad": True}),
        ("Adam", {"lr": torch.tensor(0.1), "foreach": False}),
        ("Adam", {"differentiable": True}),
        ("AdamW", {"amsgrad": True}),
        ("AdamW", {"foreach": True}),
        ("AdamW", {"fused": True}),
        ("RMSprop", {"centered": True, "momentum": 0.5}),
        ("RMSprop", {"foreach": True}),
        ("Adagrad", {"lr_decay": 0.1}),
        ("Adagrad", {"foreach": True}),
        ("Adagrad", {"fused": True}),
        ("Adadelta", {}),
        ("Adadelta", {"foreach": True}),
        ("Adamax", {}),
        ("Adamax", {"foreach": True}),
        ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
        ("NAdam", {"foreach": True}),
        ("RAdam", {}),
        ("RAdam", {"foreach": True}),
        ("ASGD", {"t0": 2}),
        ("ASGD", {"foreach": True}),
        ("Rprop", {}),
        ("Rprop", {"foreach": True}),
    ],
)
def test_elementwise_optimizers_pass(shard_group: ShardGroup, name: str, options: dict[str, Any]) -> None:
    check_elementwise(getattr(torch.optim, name)(cuts(shard_group), **options))


@pytest.mark.parametrize(
    ("name", "kinds", "reason"),
    [
        *(("Adafactor", [kind], "not elementwise") for kind in KINDS),
        ("Muon", [((6, 4), 0)], "not elementwise"),
        ("Muon", [((6, 4), 1)], "not elementwise"),
        ("LBFGS", [((6, 4), 0)], "not elementwise: .*dot products"),
        ("SparseAdam", [((6, 4), 0)], "does not support dense gradients"),
    ],
)
def test_others_are_refused_with_the_reason(
    shard_group: ShardGroup, name: str, kinds: list[tuple[tuple[int, ...], int]], reason: str
) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"This torch has no {name}.")
    with pytest.raises(SpecError, match=rf"torch\.optim\.\S*{name} was asked.*{reason}.*AdamW.*evenly\.shards\.Lamb"):
        check_elementwise(getattr(torch.optim, name)(cuts(shard_group, kinds)))


@pytest.mark.parametrize("build", [Adafactor, Lamb])
def test_our_own_pass(shard_group: ShardGroup, build: Callable[..., Optimizer]) -> None:
    check_elementwise(build(cuts(shard_group)))


def test_a_plain_lamb_would_not_pass(shard_group: ShardGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (probe, trial_steps):
        monkeypatch.setattr(module, "RANK_SUMMING", ())
    for build in (Adafactor, Lamb):
        with pytest.raises(SpecError, match="not elementwise"):
            check_elementwise(build(cuts(shard_group)))


def test_whole_parameters_let_any_optimizer_pass(shard_group: ShardGroup) -> None:
    plain, replicated = torch.nn.Parameter(torch.ones(6, 4)), cut(shard_group, (6, 4), None)
    check_elementwise(torch.optim.Adafactor([plain, replicated]))
    check_elementwise(torch.optim.LBFGS([plain, replicated]))


@pytest.mark.parametrize("name", ["AdaFactor", "Lamb", "LARS", "SOAP", "Prodigy", "DAdaptAdaGrad", "SWATS"])
def test_optimizers_of_the_library_pytorch_optimizer_that_see_norms_are_refused(
    shard_group: ShardGroup, name: str
) -> None:
    library = pytest.importorskip("pytorch_optimizer")
    with pytest.raises(SpecError, match=f"{name} was asked"):
        check_elementwise(getattr(library, name)(cuts(shard_group, [((6, 4), 0)])))


@pytest.mark.parametrize("name", ["Lion", "AdaBelief", "Yogi", "Adan", "RAdam", "AggMo"])
def test_optimizers_of_the_library_pytorch_optimizer_that_are_elementwise_pass(
    shard_group: ShardGroup, name: str
) -> None:
    library = pytest.importorskip("pytorch_optimizer")
    optimizer = getattr(library, name)(cuts(shard_group, KINDS[1:3]))
    check_elementwise(optimizer)
    optimizer.step()
    probe._reasons.clear()
    check_elementwise(optimizer)  # what it counts in its groups does not matter


class Centered(torch.optim.SGD):
    """Subtracts the mean over dim 1 from gradients, every so many steps: exact if only dim 0 is cut."""

    def __init__(self, params: Any, lr: float = 0.1, every: int = 1) -> None:
        super().__init__(params, lr)
        self.every, self.count = every, 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.count % self.every == 0 and parameter.dim() > 1:
                    parameter.grad -= parameter.grad.mean(1, keepdim=True)
        return super().step(closure)


def test_what_counts_is_the_dim_that_is_cut(shard_group: ShardGroup) -> None:
    check_elementwise(Centered(cuts(shard_group, [((6, 4), 0), ((6, 4, 3, 3), 0), ((6,), 0)])))
    with pytest.raises(SpecError, match="along dim 1"):
        check_elementwise(Centered(cuts(shard_group, [((6, 4), 1)])))


def test_an_argument_kept_as_an_attribute_counts(shard_group: ShardGroup) -> None:
    with pytest.raises(SpecError, match="Centered"):
        check_elementwise(Centered(cuts(shard_group, [((6, 4), 1)]), every=7))
    check_elementwise(Centered(cuts(shard_group, [((6, 4), 1)]), every=10**9))


def test_a_group_with_options_of_its_own_is_tried_with_them(shard_group: ShardGroup) -> None:
    class Sometimes(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if group.get("normed", False):
                        parameter.grad /= parameter.grad.norm()
            return super().step(closure)

    first, second = cuts(shard_group, KINDS[:2])
    check_elementwise(Sometimes([{"params": [first]}, {"params": [second], "lr": 0.3}], lr=0.1))
    with pytest.raises(SpecError, match="Sometimes"):
        check_elementwise(Sometimes([{"params": [first]}, {"params": [second], "normed": True}], lr=0.1))


def test_named_parameters_and_schedules_do_not_disturb(shard_group: ShardGroup) -> None:
    named = [(f"w{number}", parameter) for number, parameter in enumerate(cuts(shard_group))]
    optimizer = torch.optim.AdamW(named, lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    check_elementwise(optimizer)


def test_an_optimizer_that_cannot_be_copied_is_refused(shard_group: ShardGroup) -> None:
    class Needy(torch.optim.SGD):
        def __init__(self, params: Any, secret: object) -> None:
            super().__init__(params, 0.1)
            self.kept = [secret]

    check_elementwise(Needy(cuts(shard_group), object()))
    with pytest.raises(SpecError, match=r"Needy.*it holds a lock, which cannot be copied"):
        check_elementwise(Needy(cuts(shard_group), threading.Lock()))


def test_an_optimizer_that_does_not_move_is_refused(shard_group: ShardGroup) -> None:
    class Lazy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            return

    with pytest.raises(SpecError, match="does not move"):
        check_elementwise(Lazy(cuts(shard_group), lr=0.1))


def test_an_optimizer_that_remembers_what_it_does_not_show_is_refused(shard_group: ShardGroup) -> None:
    class Mindful(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["secret"] = object()
            return super().step(closure)

    with pytest.raises(SpecError, match="secret is a object"):
        check_elementwise(Mindful(cuts(shard_group), lr=0.1))


def test_a_class_is_tried_once_for_its_options(shard_group: ShardGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    original = probe._trial_reason
    monkeypatch.setattr(probe, "_reasons", {})
    monkeypatch.setattr(probe, "_trial_reason", lambda *given: (tried.append(given), original(*given))[1])
    for _ in range(3):
        check_elementwise(torch.optim.SGD(cuts(shard_group, KINDS[:2]), lr=0.1))
    assert len(tried) == 1
    check_elementwise(torch.optim.SGD(cuts(shard_group, KINDS[:2]), lr=0.2, momentum=0.9))
    assert len(tried) == 2


@pytest.mark.usefixtures("watching")
def test_a_watched_optimizer_is_refused_at_its_first_step_and_nothing_is_changed(shard_group: ShardGroup) -> None:
    parameter = cut(shard_group, (6, 4), 0)
    optimizer = torch.optim.Adafactor([parameter])
    for _ in range(2):
        with pytest.raises(SpecError, match="Adafactor"):
            optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(6, 4))
    good = torch.optim.Adam([parameter])
    good.step()
    assert not torch.equal(parameter.detach(), torch.ones(6, 4))


@pytest.mark.usefixtures("watching")
def test_watching_looks_once_and_again_when_a_group_is_added(
    shard_group: ShardGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Optimizer] = []
    monkeypatch.setattr(probe, "check_elementwise", lambda optimizer, *_: seen.append(optimizer))
    plain = torch.nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3)
    optimizer = torch.optim.Adafactor([plain])
    optimizer.step(), optimizer.step()
    assert seen == [optimizer]
    monkeypatch.undo()
    optimizer.add_param_group({"params": [cut(shard_group, (6, 4), 0)]})
    with pytest.raises(SpecError, match="Adafactor"):
        optimizer.step()


@pytest.mark.usefixtures("watching")
def test_watching_twice_is_watching_once() -> None:
    count = len(global_step_hooks()[0])
    threads = [threading.Thread(target=watch_optimizers) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(global_step_hooks()[0]) == count
