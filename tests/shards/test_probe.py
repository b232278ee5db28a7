"""Optimizers that would give other numbers on cut parameters are found out by trying."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from evenly._errors import SpecError
from evenly._torch.optimizers import step_hooks_of_all
from evenly.comm import Alarm, Party, Wire, open_group
from evenly.shards import probe, trials
from evenly.shards.optim import Adafactor, Lamb
from evenly.shards.placement import Placement, place
from evenly.shards.probe import check_elementwise, watch_optimizers

KINDS = [((6,), 0), ((6, 4), 0), ((6, 4), 1), ((6, 4, 3, 3), 0), ((6, 4, 3, 3), 1)]


@pytest.fixture
def wire() -> Iterator[Wire]:
    party = Party(0, 1, dist.HashStore())
    wire = Wire(open_group(party, "w", [0], backend="gloo", timeout_s=20), Alarm(party))
    yield wire
    wire.close()


@pytest.fixture
def watching() -> Iterator[None]:
    """Puts the hooks in for a test, and takes them out after."""
    end = watch_optimizers()
    yield
    end()


def cut(wire: Wire, shape: tuple[int, ...], dim: int | None) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(shape))
    segments = () if dim is None else (((0, shape[dim]),),)
    place(parameter, Placement("w", parameter.shape, wire, dim, segments))
    parameter.grad = torch.ones(shape)
    return parameter


def cuts(wire: Wire, kinds: list[tuple[tuple[int, ...], int]] = KINDS) -> list[torch.nn.Parameter]:
    return [cut(wire, shape, dim) for shape, dim in kinds]


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
def test_elementwise_optimizers_pass(wire: Wire, name: str, options: dict[str, Any]) -> None:
    check_elementwise(getattr(torch.optim, name)(cuts(wire), **options))


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
    wire: Wire, name: str, kinds: list[tuple[tuple[int, ...], int]], reason: str
) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"This torch has no {name}.")
    with pytest.raises(SpecError, match=rf"torch\.optim\.\S*{name} was asked.*{reason}.*AdamW.*evenly\.shards\.Lamb"):
        check_elementwise(getattr(torch.optim, name)(cuts(wire, kinds)))


@pytest.mark.parametrize("build", [Adafactor, Lamb])
def test_our_own_pass(wire: Wire, build: Callable[..., Optimizer]) -> None:
    check_elementwise(build(cuts(wire)))


def test_a_plain_lamb_would_not_pass(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (probe, trials):
        monkeypatch.setattr(module, "EXACT", ())
    for build in (Adafactor, Lamb):
        with pytest.raises(SpecError, match="not elementwise"):
            check_elementwise(build(cuts(wire)))


def test_whole_parameters_let_any_optimizer_pass(wire: Wire) -> None:
    plain, replicated = torch.nn.Parameter(torch.ones(6, 4)), cut(wire, (6, 4), None)
    check_elementwise(torch.optim.Adafactor([plain, replicated]))
    check_elementwise(torch.optim.LBFGS([plain, replicated]))


@pytest.mark.parametrize("name", ["AdaFactor", "Lamb", "LARS", "SOAP", "Prodigy", "DAdaptAdaGrad", "SWATS"])
def test_optimizers_of_the_library_pytorch_optimizer_that_see_norms_are_refused(wire: Wire, name: str) -> None:
    library = pytest.importorskip("pytorch_optimizer")
    with pytest.raises(SpecError, match=f"{name} was asked"):
        check_elementwise(getattr(library, name)(cuts(wire, [((6, 4), 0)])))


@pytest.mark.parametrize("name", ["Lion", "AdaBelief", "Yogi", "Adan", "RAdam", "AggMo"])
def test_optimizers_of_the_library_pytorch_optimizer_that_are_elementwise_pass(wire: Wire, name: str) -> None:
    library = pytest.importorskip("pytorch_optimizer")
    optimizer = getattr(library, name)(cuts(wire, KINDS[1:3]))
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


def test_what_counts_is_the_dim_that_is_cut(wire: Wire) -> None:
    check_elementwise(Centered(cuts(wire, [((6, 4), 0), ((6, 4, 3, 3), 0), ((6,), 0)])))
    with pytest.raises(SpecError, match="along dim 1"):
        check_elementwise(Centered(cuts(wire, [((6, 4), 1)])))


def test_an_argument_kept_as_an_attribute_counts(wire: Wire) -> None:
    with pytest.raises(SpecError, match="Centered"):
        check_elementwise(Centered(cuts(wire, [((6, 4), 1)]), every=7))
    check_elementwise(Centered(cuts(wire, [((6, 4), 1)]), every=10**9))


def test_a_group_with_options_of_its_own_is_tried_with_them(wire: Wire) -> None:
    class Sometimes(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if group.get("normed", False):
                        parameter.grad /= parameter.grad.norm()
            return super().step(closure)

    first, second = cuts(wire, KINDS[:2])
    check_elementwise(Sometimes([{"params": [first]}, {"params": [second], "lr": 0.3}], lr=0.1))
    with pytest.raises(SpecError, match="Sometimes"):
        check_elementwise(Sometimes([{"params": [first]}, {"params": [second], "normed": True}], lr=0.1))


def test_named_parameters_and_schedules_do_not_disturb(wire: Wire) -> None:
    named = [(f"w{number}", parameter) for number, parameter in enumerate(cuts(wire))]
    optimizer = torch.optim.AdamW(named, lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    check_elementwise(optimizer)


def test_an_optimizer_that_cannot_be_copied_is_refused(wire: Wire) -> None:
    class Needy(torch.optim.SGD):
        def __init__(self, params: Any, secret: object) -> None:
            super().__init__(params, 0.1)
            self.kept = [secret]

    check_elementwise(Needy(cuts(wire), object()))
    with pytest.raises(SpecError, match=r"Needy.*it holds a lock, which cannot be copied"):
        check_elementwise(Needy(cuts(wire), threading.Lock()))


def test_an_optimizer_that_does_not_move_is_refused(wire: Wire) -> None:
    class Lazy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            return

    with pytest.raises(SpecError, match="does not move"):
        check_elementwise(Lazy(cuts(wire), lr=0.1))


def test_an_optimizer_that_remembers_what_it_does_not_show_is_refused(wire: Wire) -> None:
    class Mindful(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["secret"] = object()
            return super().step(closure)

    with pytest.raises(SpecError, match="secret is a object"):
        check_elementwise(Mindful(cuts(wire), lr=0.1))


def test_a_class_is_tried_once_for_its_options(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    original = probe._try
    monkeypatch.setattr(probe, "_reasons", {})
    monkeypatch.setattr(probe, "_try", lambda *given: (tried.append(given), original(*given))[1])
    for _ in range(3):
        check_elementwise(torch.optim.SGD(cuts(wire, KINDS[:2]), lr=0.1))
    assert len(tried) == 1
    check_elementwise(torch.optim.SGD(cuts(wire, KINDS[:2]), lr=0.2, momentum=0.9))
    assert len(tried) == 2


@pytest.mark.usefixtures("watching")
def test_a_watched_optimizer_is_refused_at_its_first_step_and_nothing_is_changed(wire: Wire) -> None:
    parameter = cut(wire, (6, 4), 0)
    optimizer = torch.optim.Adafactor([parameter])
    for _ in range(2):
        with pytest.raises(SpecError, match="Adafactor"):
            optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(6, 4))
    good = torch.optim.Adam([parameter])
    good.step()
    assert not torch.equal(parameter.detach(), torch.ones(6, 4))


@pytest.mark.usefixtures("watching")
def test_watching_looks_once_and_again_when_a_group_is_added(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Optimizer] = []
    monkeypatch.setattr(probe, "check_elementwise", lambda optimizer, *_: seen.append(optimizer))
    plain = torch.nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3)
    optimizer = torch.optim.Adafactor([plain])
    optimizer.step(), optimizer.step()
    assert seen == [optimizer]
    monkeypatch.undo()
    optimizer.add_param_group({"params": [cut(wire, (6, 4), 0)]})
    with pytest.raises(SpecError, match="Adafactor"):
        optimizer.step()


@pytest.mark.usefixtures("watching")
def test_watching_twice_is_watching_once() -> None:
    count = len(step_hooks_of_all()[0])
    threads = [threading.Thread(target=watch_optimizers) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(step_hooks_of_all()[0]) == count
