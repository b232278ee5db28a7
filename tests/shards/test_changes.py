"""What is changed after a network was cut is followed, or refused by name: attributes, submodules, modes, hooks."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenly.comm import RankGroup
from evenly.errors import MismatchError
from evenly.shards import shard_model, verify
from tests.ranks import RankError, run_ranks
from tests.shards.playing import Act, play

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
SHARES = [3, 2]
LEVEL = 1.0


@dataclass
class Settings:
    __slots__ = ("level",)
    level: float


class Shared:
    level = 1.0


class Block(nn.Module):
    """Reads a number in many ways."""

    kind_level = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.0)
        self.alpha, self.flag, self.unread = 1.0, False, 0
        self.levels, self.table, self.sizes = [1.0, 2.0], {"a": {"b": 1.0}}, deque([1.0])
        self.config, self.slotted = SimpleNamespace(level=1.0), Settings(1.0)
        self.loose = [torch.ones(8, dtype=torch.float64)]
        self.scale = lambda x: x * self.alpha
        self.gain = 1.0

    @property
    def beta(self) -> float:
        return self.__dict__["gain"]

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.act(self.norm(self.first(x)))) * self.alpha * self.levels[1] * self.table["a"]["b"]
        h = h * self.config.level * self.slotted.level * self.sizes[0] * self.kind_level * LEVEL * Shared.level
        h = self.scale(h) * getattr(self, "late", 1.0) * self.beta * self.loose[0]
        if self.flag:
            h = torch.tanh(h) + torch.sigmoid(h)
        out: Tensor = self.second(h)
        return out


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head, self.alpha = Block(), nn.Linear(6, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(x)) * self.alpha
        return out * (2.0 if self.block.norm.training else 1.0)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make().double()

    return build


build = seeded(Root)


def put(path: str, value: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return change


FOLLOWED: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda m: None,
    "attribute of the root": put("alpha", 0.5),
    "attribute of a block": put("block.alpha", 0.5),
    "an equal value": put("block.alpha", float("1.0")),
    "an attribute that is not read": put("block.unread", 5),
    "an item of a list": lambda m: m.block.levels.__setitem__(1, 0.5),
    "an item of a dict": lambda m: m.block.table["a"].update(b=0.5),
    "an item of a queue": lambda m: (m.block.sizes.clear(), m.block.sizes.append(0.5)),
    "an attribute of an object": lambda m: setattr(m.block.config, "level", 0.5),
    "a slot of an object": lambda m: setattr(m.block.slotted, "level", 0.5),
    "a tensor that is no buffer": lambda m: m.block.loose[0].mul_(0.5),
    "an attribute that was not there": put("block.late", 0.5),
    "what a property reads": lambda m: vars(m.block).update(gain=0.5),
    "a function": put("block.scale", lambda x: x * 0.5),
    "an attribute of torch's": put("block.norm.momentum", 0.5),
    "eps": put("block.norm.eps", 0.5),
    "a submodule": put("block.act", nn.GELU()),
    "a parameter": lambda m: put("block.first.bias", nn.Parameter(m.block.first.bias.detach() * 0.5))(m),
    "a buffer": lambda m: put("block.norm.running_mean", m.block.norm.running_mean.detach() * 0.5 + 1)(m),
    "a class": lambda m: setattr(type(m.block), "kind_level", 0.5),
    "the mode of a submodule": lambda m: m.block.norm.eval(),
    "the mode of a block": lambda m: m.block.eval(),
}
REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a flag": (put("block.flag", True), "'block.flag'"),
    "a layer": (put("head", nn.Linear(6, 3).double()), "'head"),
    "a layer of another width": (put("block.second", nn.Linear(8, 5).double()), "'block.second"),
    "a module for a submodule": (put("block.act", nn.Softmax(-1)), "'block.act'"),
    "a hook": (lambda m: m.block.first.register_forward_hook(lambda *_: None), "forward hooks"),
    "a parameter that is tied now": (lambda m: put("block.norm.weight", m.block.norm.bias)(m), "'block.norm.weight'"),
    "a parameter that is gone": (lambda m: put("block.first.bias", None)(m), "'block.first.bias'"),
}


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    yield
    Block.kind_level = Shared.level = 1.0


def fresh() -> nn.Module:
    Block.kind_level = 1.0
    return build()


def test_changes_are_followed_one_after_another() -> None:
    quick = (
        "attribute of the root",
        "an item of a dict",
        "an attribute of an object",
        "an attribute that was not there",
    )
    quick += ("an attribute of torch's", "a submodule", "a parameter", "the mode of a submodule")
    acts = [Act(X), *(Act(X, FOLLOWED[name]) for name in quick), Act(X, lambda m: m.eval(), trains=False)]
    assert play(fresh, X, SHARES, acts) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_change_is_followed(name: str) -> None:
    acts = [Act(X), Act(X, FOLLOWED[name]), Act(X[:3]), Act(X, lambda m: m.eval(), trains=False)]
    assert play(fresh, X, SHARES, acts) == ""


QUICK = {"a flag", "a layer", "a hook", "a parameter that is tied now"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in REFUSED]
)
def test_a_change_is_refused_by_name(name: str) -> None:
    change, said = REFUSED[name]
    acts = [Act(X), Act(X, change)]
    if name == "a layer of another width":
        acts[1] = Act(X, lambda m: (change(m), put("head", nn.Linear(5, 3).double())(m)))
    assert said in play(build, X, SHARES, acts)


def test_a_forward_that_is_patched_after_the_cut_runs_or_is_refused_by_name() -> None:
    def patch(model: nn.Module) -> None:
        block: Any = model.get_submodule("block")
        block.forward = lambda x: Block.forward(block, x) * 2 if isinstance(block, Block) else x

    said = play(build, X, SHARES, [Act(X), Act(X, patch)])
    assert said == "" or "'block.forward'" in said


def test_settings_of_a_file_and_of_a_function_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    level = 1.0

    class Closing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.two(self.one(x) * level * LEVEL * Shared.level)
            return out

    def rank(rank_group: RankGroup, models: list[nn.Module]) -> list[Tensor]:
        nonlocal level
        cut = shard_model(models[rank_group.rank], X, rank_group=rank_group, shares=SHARES)
        found = [cut(X).detach()]
        if rank_group.rank == 0:
            level, Shared.level = 2.0, 3.0
            monkeypatch.setitem(globals(), "LEVEL", 5.0)
        rank_group.store.wait  # noqa: B018  # ranks are threads of one process: what one sets, all have
        waiter = cut.shard_group.sum(torch.ones(1)).wait()
        found.append(cut(X).detach() * waiter / waiter)
        cut.close()
        return found

    torch.manual_seed(0)
    models = [Closing().double() for _ in SHARES]
    models[1].load_state_dict(models[0].state_dict())
    for first, second in run_ranks(2, rank, models):
        plain = models[0]
        torch.testing.assert_close(second, plain(X).detach())
        level, Shared.level = 1.0, 1.0
        monkeypatch.undo()
        torch.testing.assert_close(first, plain(X).detach())
        level, Shared.level = 2.0, 3.0
        monkeypatch.setitem(globals(), "LEVEL", 5.0)


def test_a_change_on_one_rank_only_is_refused_on_all() -> None:
    def rank(rank_group: RankGroup, models: list[nn.Module]) -> None:
        cut: Any = shard_model(models[rank_group.rank], X, rank_group=rank_group, shares=SHARES, timeout_s=30.0)
        try:
            cut(X)
            if rank_group.rank == 1:
                cut.block.alpha = 0.5
            cut(X)
        finally:
            cut.close()

    with pytest.raises(RankError) as caught:
        run_ranks(2, rank, [build() for _ in SHARES])
    assert all(caught.value.errors)
    assert any(isinstance(error, MismatchError) for error in caught.value.errors)


def test_a_change_of_the_network_that_was_given_is_refused_by_name() -> None:
    model = build()

    def rank(rank_group: RankGroup) -> None:
        cut: Any = shard_model(model, X, rank_group=rank_group, shares=SHARES)
        try:
            cut(X)
            model.block.alpha = 0.5
            cut.block.alpha = 0.5
            cut(X)
            model.block.alpha = 0.25
            cut(X)
        finally:
            cut.close()

    with pytest.raises(RankError, match=r"'block.alpha' of the network that was given to be cut is 0.25 now, but 0.5"):
        run_ranks(2, rank)


def test_a_changed_network_is_verified_as_it_is_now() -> None:
    def rank(rank_group: RankGroup, models: list[nn.Module]) -> None:
        plain: Any = models[rank_group.rank]
        cut: Any = shard_model(plain, X, rank_group=rank_group, shares=SHARES)
        plain.block.alpha = cut.block.alpha = 0.5
        assert verify(plain, cut, X).ok
        cut.close()

    run_ranks(2, rank, [build() for _ in SHARES])


def test_settings_of_the_root_are_read_and_set_through_the_cut_network() -> None:
    def rank(rank_group: RankGroup, models: list[nn.Module]) -> None:
        cut: Any = shard_model(models[rank_group.rank], X, rank_group=rank_group, shares=SHARES)
        assert cut.alpha == 1.0
        cut.alpha, cut.note = 3.0, "mine"
        assert (cut.alpha, cut.note) == (3.0, "mine")
        del cut.note
        assert not hasattr(cut, "note")
        cut.close()

    run_ranks(2, rank, [build() for _ in SHARES])


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.config = nn.Linear(6, 3), SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.config.calls += 1
        out: Tensor = self.one(x) * self.config.calls
        return out


def test_a_forward_that_changes_what_it_reads_is_refused_by_name() -> None:
    assert "config.calls" in play(seeded(Noting), X, SHARES, [Act(X)])


@pytest.mark.parametrize("draw", ["random", "numpy"])
def test_random_numbers_of_python_are_refused(draw: str) -> None:
    import random

    import numpy as np

    class Drawing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (random.random() if draw == "random" else float(np.random.rand()))

    assert "random numbers" in play(seeded(lambda: nn.Sequential(Drawing(6, 3))), X, SHARES, [Act(X)])


class Asking(nn.Module):
    """Asks for what differs from call to call."""

    def __init__(self, ask: Callable[[nn.Module, Tensor], bool]) -> None:
        super().__init__()
        self.one, self.two, self.ask = nn.Linear(6, 8), nn.Linear(8, 3), ask

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        out: Tensor = self.two(h * 2 if self.ask(self, h) else h)
        return out


@pytest.mark.parametrize(
    "ask",
    [
        lambda _, h: torch.is_grad_enabled(),
        lambda _, h: h.requires_grad,
        lambda _, h: h.device.type == "cpu",
        lambda _, h: not h.is_cuda,
        lambda m, h: m.one.weight.requires_grad,
    ],
)
def test_what_differs_from_call_to_call_is_asked_then_or_refused(ask: Callable[[nn.Module, Tensor], bool]) -> None:
    acts = [Act(X), Act(X, trains=False), Act(X)]
    said = play(seeded(lambda: nn.Sequential(Asking(ask))), X, SHARES, acts)
    assert said == "" or "Asking" in said or "Sequential" in said


def test_a_module_computed_whole_cannot_borrow_what_is_cut() -> None:
    class Borrowing(nn.Module):
        """Computed whole, with the weight of another module, which it keeps in a list."""

        def __init__(self, lender: nn.Linear) -> None:
            super().__init__()
            self.lenders, self.method = [lender], lender.extra_repr

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > -1e9:  # cannot be traced
                return x + self.lenders[0].bias.sum()
            return x

    def borrowing() -> nn.Module:
        torch.manual_seed(0)
        lender = nn.Linear(6, 8)
        return nn.Sequential(lender, Borrowing(lender), nn.Linear(8, 3)).double()

    assert "the module '1' is computed whole" in play(borrowing, X, SHARES, [Act(X), Act(X), Act(X)])
