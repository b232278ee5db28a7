"""The full state of a cut network is that of the uncut one, and goes on in any other split and in plain torch."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils import _pytree as pytree

from evenly.checkpoints import load_dcp, save_dcp
from evenly.comm import RankGroup
from evenly.errors import CheckpointError, MismatchError
from evenly.graph import Traced, trace_module
from evenly.layouts import lay_out
from evenly.shards import Adafactor, Sharded, join_shards
from evenly.shards.state.full_state import full_state_dict, load_full_state_dict
from evenly.spec.layout import Layout
from tests.ranks import RankError, run_ranks
from tests.zoo import ZOO

Build = Callable[..., Optimizer]
State = dict[str, Any]

LOCK = threading.RLock()  # ranks are threads and share torch's generator
THREE, TWO = [70, 25, 5], [1, 3]
single_process = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Tail(nn.Module):
    """Adds a buffer that is saved, and multiplies by one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.ones(10), persistent=False)
        self.register_buffer("offset", torch.linspace(0, 1, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.offset) * self.hidden


class Small(nn.Module):
    """Convolutions with batch norm and dropout, a tied pair of linears, a scale, and a tail with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.inner = nn.Conv2d(12, 9, 3, padding=1)
        self.dropout = nn.Dropout(0.3)
        self.up, self.down = nn.Linear(9, 10), nn.Linear(9, 10)
        self.down.weight = self.up.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.tail = Tail()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(torch.relu(self.norm(self.conv(x))))
        x = self.dropout(x).mean((2, 3))
        return self.tail(self.up(x) * self.scale + torch.tanh(self.down(x)))


def draw(name: str) -> tuple[nn.Module, list[tuple[torch.Tensor, ...]]]:
    """Returns a network and four batches, the same for every call."""
    with LOCK:
        torch.manual_seed(7)
        if name == "tail":
            return Tail().double(), [(torch.randn(4, 10, dtype=torch.float64),)]
        if name.startswith("small"):
            model = Small().double()
            model.dropout.p = 0.3 if name == "small_dropout" else 0.0
            return model, [(torch.randn(4, 3, 6, 6, dtype=torch.float64),) for _ in range(4)]
        return ZOO[name].build(), [ZOO[name].example() for _ in range(4)]


def train(model: nn.Module, optimizer: Optimizer, batches: list[tuple[torch.Tensor, ...]]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        leaves = [x for x in pytree.tree_leaves(model(*batch)) if x.is_floating_point()]
        sum((x.square().mean() for x in leaves), start=torch.zeros(())).backward()
        optimizer.step()


def agree(found: Any, truth: Any, tolerance: float = 1e-10, where: str = "state") -> None:
    if isinstance(truth, torch.Tensor):
        assert (found.shape, found.dtype) == (truth.shape, truth.dtype), where
        if truth.is_floating_point():
            assert (found - truth).abs().max() <= tolerance * truth.abs().max().clamp_min(1e-3), where
        else:
            assert torch.equal(found, truth), where
    elif isinstance(truth, dict):
        assert list(found) == list(truth), where
        for key, value in truth.items():
            agree(found[key], value, tolerance, f"{where}.{key}")
    elif isinstance(truth, list):
        assert len(found) == len(truth), where
        for number, value in enumerate(truth):
            agree(found[number], value, tolerance, f"{where}.{number}")
    else:
        assert found == truth, where


@cache
def followed(name: str) -> tuple[Traced, list[tuple[torch.Tensor, ...]]]:
    """Returns what `draw` returns with the network traced: ranks take copies of it."""
    model, batches = draw(name)
    return trace_module(model, batches[0]), batches


@contextmanager
def cut(
    rank_group: RankGroup, name: str, shares: list[int]
) -> Iterator[tuple[Sharded, list[tuple[torch.Tensor, ...]]]]:
    with LOCK:  # fx patches modules while it traces
        traced, batches = followed(name)
        torch.manual_seed(7)
    sharded = join_shards(traced, lay_out(traced.graph, shares), rank_group=rank_group, timeout_s=30)
    try:
        yield sharded, batches
    finally:
        sharded.close()


def begin(rank_group: RankGroup, name: str, build: Build, shares: list[int]) -> State:
    """Trains two steps and returns the full state."""
    with cut(rank_group, name, shares) as (model, batches):
        optimizer = build(model.parameters())
        train(model, optimizer, batches[:2])
        return full_state_dict(model, optimizer)


def go_on(rank_group: RankGroup, name: str, build: Build, shares: list[int], state: State) -> State:
    """Trains two steps more and returns the full state."""
    with cut(rank_group, name, shares) as (model, batches):
        optimizer = build(model.parameters())
        held = {key: id(parameter) for key, parameter in model.named_parameters()}
        assert list(held) == [key for key, _ in draw(name)[0].named_parameters()]
        load_full_state_dict(model, state, optimizer)
        assert held == {key: id(parameter) for key, parameter in model.named_parameters()}
        train(model, optimizer, batches[2:])
        return full_state_dict(model, optimizer)


def alone(name: str, build: Build, start: int = 0, stop: int = 4, state: State | None = None) -> State:
    model, batches = draw(name)
    optimizer = build(model.parameters())
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, batches[start:stop])
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-3)


def adam(parameters: Any) -> Optimizer:
    return Adam(parameters, lr=1e-3)


def adafactor(parameters: Any) -> Optimizer:
    return Adafactor(parameters, lr=1e-2, weight_decay=1e-2)


def torch_adafactor(parameters: Any) -> Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2, weight_decay=1e-2)


@pytest.mark.parametrize(
    ("name", "build", "plain"),
    [
        ("small", sgd, sgd),
        ("small", adam, adam),
        ("small", adafactor, torch_adafactor),
        ("autoencoder1d", adafactor, torch_adafactor),
        ("gpt2_separate_tied", sgd, sgd),
    ],
)
def test_training_goes_on_in_another_split_and_in_plain_torch(name: str, build: Build, plain: Build) -> None:
    half, truth = alone(name, plain, stop=2), alone(name, plain)
    states = run_ranks(3, begin, name, build, THREE)
    for state in states:
        agree({key: state[key] for key in half}, half)
    assert states[0]["optimizer_class"] == type(plain([nn.Parameter(torch.ones(2))])).__name__
    for state in run_ranks(2, go_on, name, build, TWO, states[0]):
        agree({key: state[key] for key in truth}, truth)
    agree(alone(name, plain, 2, 4, states[1]), truth)
    if name == "small":
        back = run_ranks(3, go_on, name, build, THREE, half)[0]
        agree({key: back[key] for key in truth}, truth)


def test_dropout_masks_go_on_where_they_were() -> None:
    def whole(rank_group: RankGroup) -> State:
        with cut(rank_group, "small_dropout", THREE) as (model, batches):
            optimizer = sgd(model.parameters())
            train(model, optimizer, batches)
            return full_state_dict(model, optimizer)

    truth = run_ranks(3, whole)[0]
    half = run_ranks(3, begin, "small_dropout", sgd, THREE)[0]
    assert half["dropout"]["passes"] == 2
    agree(run_ranks(2, go_on, "small_dropout", sgd, TWO, half)[0], truth)


def test_rank_0_alone_can_have_the_state_and_tied_tensors_stay_one() -> None:
    def act(rank_group: RankGroup) -> tuple[State, bool]:
        with cut(rank_group, "small", THREE) as (model, _):
            state = full_state_dict(model, everywhere=False, device="cpu")
            mine = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
            apart = all(id(tensor) not in mine for tensor in state.get("model", {}).values())
            return state, apart

    (state, apart), *others = run_ranks(3, act)
    assert [other for other, _ in others] == [{}, {}]
    truth = draw("small")[0].state_dict()
    assert list(state) == ["model", "dropout"]
    assert apart
    assert list(state["model"]) == list(truth)
    assert state["model"]._metadata.keys() == truth._metadata.keys()
    assert all(torch.equal(state["model"][key], value) for key, value in truth.items())
    assert state["model"]["up.weight"] is state["model"]["down.weight"]


def test_buffers_of_the_network_itself_that_are_not_saved_are_left_out() -> None:
    def act(rank_group: RankGroup) -> list[str]:
        with cut(rank_group, "tail", TWO) as (model, _):
            load_full_state_dict(model, draw("tail")[0].state_dict())
            return list(full_state_dict(model)["model"])

    assert run_ranks(2, act) == [["offset"]] * 2


def test_a_network_on_one_rank_gets_copies() -> None:
    def act(rank_group: RankGroup) -> bool:
        with cut(rank_group, "small", [1]) as (model, _):
            state = full_state_dict(model)["model"]
            held = {tensor.data_ptr() for tensor in model.state_dict().values()}
            return not any(tensor.data_ptr() in held for tensor in state.values())

    assert run_ranks(1, act) == [True]


def test_a_plain_state_dict_can_be_loaded_by_a_rank_without_a_share_too() -> None:
    weights = {key: value + 1 for key, value in draw("small")[0].state_dict().items()}

    def act(rank_group: RankGroup) -> State:
        with cut(rank_group, "small", [2, 0, 1]) as (model, _):
            load_full_state_dict(model, weights)
            return full_state_dict(model)

    first, second, third = run_ranks(3, act)
    assert second == {}
    for state in (first, third):
        agree(dict(state["model"]), weights, 0.0)


class Counting(SGD):
    """An optimizer with a plain number of steps in its groups."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


@pytest.mark.parametrize("build", [Counting, adam])
def test_counts_of_steps_are_kept_in_either_form(build: Build) -> None:
    state = run_ranks(3, begin, "small", build, THREE)[0]["optimizer"]
    if build is adam:
        assert [slot["step"].item() for slot in state["state"].values()] == [2.0] * 9
    else:
        assert [group["step"] for group in state["param_groups"]] == [2]

    def act(rank_group: RankGroup) -> Any:
        with cut(rank_group, "small", TWO) as (model, _):
            optimizer = build(model.parameters())
            load_full_state_dict(model, {"model": draw("small")[0].state_dict(), "optimizer": state}, optimizer)
            held = [slot["step"].item() for slot in optimizer.state.values() if "step" in slot]
            return held or [group["step"] for group in optimizer.param_groups]

    assert run_ranks(2, act) == [[2] if build is Counting else [2.0] * 9] * 2


def changed(state: State, **changes: Any) -> State:
    """Returns a state with weights put in, or taken out by None."""
    weights = {**state["model"], **{key.replace("__", "."): value for key, value in changes.items()}}
    return {**state, "model": {key: value for key, value in weights.items() if value is not None}}


@pytest.mark.parametrize(
    ("change", "build", "message"),
    [
        (lambda s: changed(s, inner__weight=None), adam, r"lacks 'inner.weight'.*strict=False"),
        (lambda s: changed(s, extra=torch.ones(1)), adam, r"has 'extra' in addition.*strict=False"),
        (lambda s: changed(s, norm__bias=torch.ones(13)), adam, r"'norm.bias' is \[13\] there and \[12\] here"),
        (lambda s: changed(s, norm__bias="x"), adam, r"'norm.bias' is str there and \[12\] here"),
        (lambda s: s, AdamW, r"has the state of Adam, and the optimizer is AdamW"),
        (lambda s: {**s, "optimizer_class": "SGD"}, SGD, r"of another optimizer than SGD: one with 'betas', 'eps'"),
        (lambda s: s["model"], adam, r"has no state of an optimizer.*without the optimizer"),
        (lambda s: s, lambda p: adam(list(p)[1:]), r"has groups of \[9\] parameters, and the one here of \[8\]"),
        (
            lambda s: s,
            lambda p: (lambda q: adam([{"params": q[:3]}, {"params": q[3:]}]))(list(p)),
            r"has groups of \[9\] parameters, and the one here of \[3, 6\]",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    change: Callable[[State], State], build: Build, message: str
) -> None:
    saved = alone("small", adam, stop=1)
    saved = {key: pytree.tree_map(lambda x: x + 1 if isinstance(x, torch.Tensor) else x, saved[key]) for key in saved}
    wrong = change({**saved, "optimizer_class": "Adam"})

    def act(rank_group: RankGroup) -> State:
        with cut(rank_group, "small", TWO) as (model, _):
            optimizer = build(model.parameters())
            with pytest.raises(CheckpointError, match=message):
                load_full_state_dict(model, wrong, optimizer)
            state = full_state_dict(model)
            assert not optimizer.state
            return state

    for state in run_ranks(2, act):
        agree(dict(state["model"]), dict(draw("small")[0].state_dict()), 0.0)


def test_optimizer_slots_of_another_shape_are_named() -> None:
    saved = alone("small", adam, stop=1)
    saved["optimizer"]["state"][1]["exp_avg"] = torch.ones(3, 3, 3, 3)

    def act(rank_group: RankGroup) -> None:
        message = r"Adam's 'exp_avg' of 'conv.weight' is \[3, 3, 3, 3\] there and \[12, 3, 3, 3\] here"
        with cut(rank_group, "small", TWO) as (model, _), pytest.raises(CheckpointError, match=message):
            load_full_state_dict(model, saved, adam(model.parameters()))

    run_ranks(2, act)


def test_only_what_is_in_both_is_loaded_where_that_is_asked_for() -> None:
    truth = draw("small")[0].state_dict()
    some = {"norm.bias": truth["norm.bias"] + 1, "elsewhere": torch.ones(1)}

    def act(rank_group: RankGroup) -> State:
        with cut(rank_group, "small", TWO) as (model, _):
            load_full_state_dict(model, some, strict=False)
            return full_state_dict(model)

    agree(dict(run_ranks(2, act)[1]["model"]), {**truth, "norm.bias": some["norm.bias"]}, 0.0)


def test_ranks_whose_optimizers_differ_are_told_so() -> None:
    def act(rank_group: RankGroup) -> None:
        with cut(rank_group, "small", TWO) as (model, batches):
            optimizer = adam(model.parameters())
            train(model, optimizer, batches[:1])
            if rank_group.rank == 1:
                optimizer.state.pop(model.scale)
            full_state_dict(model, optimizer)

    with pytest.raises(RankError) as caught:
        run_ranks(2, act)
    assert all(isinstance(error, MismatchError) for error in caught.value.errors)
    assert "their optimizers differ, or have stepped on different parameters" in str(caught.value)


def test_state_without_a_rule_is_refused_by_all_ranks() -> None:
    def act(rank_group: RankGroup) -> None:
        with cut(rank_group, "small", TWO) as (model, batches):
            optimizer = adam(model.parameters())
            train(model, optimizer, batches[:1])
            optimizer.state[model.conv.weight]["rows"] = torch.ones(3, 5)
            full_state_dict(model, optimizer)

    with pytest.raises(RankError, match=r"Adam's 'rows' of 'conv.weight' was requested, but it is \[3, 5\] for"):
        run_ranks(2, act)


def save(rank_group: RankGroup, folder: Path, by: str, build: Build = adam) -> None:
    with cut(rank_group, "small", THREE) as (model, batches):
        optimizer = build(model.parameters())
        train(model, optimizer, batches[:2])
        save_dcp(folder, model, optimizer, by=by)


def load(rank_group: RankGroup, folder: Path, build: Build = adam) -> State:
    with cut(rank_group, "small", TWO) as (model, batches):
        optimizer = build(model.parameters())
        load_dcp(folder, model, optimizer)
        train(model, optimizer, batches[2:])
        state = full_state_dict(model, optimizer)
        return {key: state[key] for key in ("model", "optimizer")}


@single_process
@pytest.mark.parametrize("build", [adam, sgd])
def test_torch_reads_the_checkpoints_and_they_come_back(tmp_path: Path, build: Build) -> None:
    truth = alone("small", build)
    run_ranks(3, save, tmp_path / "by_name", "name", build)
    model, batches = draw("small")
    optimizer = build(model.parameters())
    weights, slots = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": slots}, checkpoint_id=tmp_path / "by_name")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=slots)
    train(model, optimizer, batches[2:])
    agree({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, truth)
    run_ranks(3, save, tmp_path / "by_index", "index", build)
    state = alone("small", build, stop=1)
    dcp.load(state, checkpoint_id=tmp_path / "by_index")
    agree(alone("small", build, 2, 4, state), truth)
    for by in ("by_name", "by_index"):
        for found in run_ranks(2, load, tmp_path / by, build):
            agree(found, truth)


@single_process
@pytest.mark.parametrize("build", [adam, sgd])
def test_checkpoints_of_torch_are_read(tmp_path: Path, build: Build) -> None:
    truth, (model, batches) = alone("small", build), draw("small")
    optimizer = build(model.parameters())
    train(model, optimizer, batches[:2])
    by_index = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    weights, slots = get_state_dict(model, optimizer)
    for name, state in (("index", by_index), ("name", {"model": weights, "optimizer": slots})):
        dcp.save(state, checkpoint_id=tmp_path / name)
        for found in run_ranks(2, load, tmp_path / name, build):
            agree(found, truth)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "weights")

    def act(rank_group: RankGroup) -> State:
        with cut(rank_group, "small", TWO) as (model, _):
            load_dcp(tmp_path / "weights", model)
            state = full_state_dict(model)
            return dict(state["model"])

    agree(run_ranks(2, act)[1], dict(model.state_dict()), 0.0)


@single_process
def test_checkpoints_of_the_wrong_form_are_named(tmp_path: Path) -> None:
    run_ranks(3, save, tmp_path / "there", "name")
    with pytest.raises(RankError, match="there is one already") as caught:
        run_ranks(3, save, tmp_path / "there", "name")
    assert all(isinstance(error, CheckpointError) for error in caught.value.errors)
    (tmp_path / "file").write_text("")
    with pytest.raises(RankError, match=r"was to write a checkpoint to .*file, but it could not") as caught:
        run_ranks(3, save, tmp_path / "file", "name")
    assert all(isinstance(error, CheckpointError) for error in caught.value.errors)
    (tmp_path / "there" / "__0_0.distcp").unlink()

    def act(rank_group: RankGroup) -> None:
        with cut(rank_group, "small", TWO) as (model, _):
            with pytest.raises(CheckpointError, match=r"was to read the checkpoint .*nowhere, but it could not"):
                load_dcp(tmp_path / "nowhere", model)
            with pytest.raises(CheckpointError, match=r"was to read the checkpoint .*there, but it could not"):
                load_dcp(tmp_path / "there", model)
            with pytest.raises(CheckpointError, match=r"an optimizer has 'x' in a group|has groups of"):
                load_full_state_dict(model, {"model": model_state, "optimizer": wrong}, sgd(model.parameters()))

    model_state = draw("small")[0].state_dict()
    wrong = {"state": {}, "param_groups": [{**sgd([nn.Parameter(torch.ones(1))]).param_groups[0], "params": ["x"]}]}
    run_ranks(2, act)


class Versioned(nn.Module):
    """Weights that were kept negative in version 1."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version") != 2:
            state[f"{prefix}linear.weight"] = -state[f"{prefix}linear.weight"]
        super()._load_from_state_dict(state, prefix, metadata, *args)

    def get_extra_state(self) -> str:
        return "kept"

    def set_extra_state(self, state: str) -> None:
        assert state == "kept"

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def test_versions_of_modules_are_kept_and_given_back() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(Versioned(), nn.BatchNorm1d(4)), Versioned()]

    def rank(rank_group: RankGroup, traced: Traced, layout: Layout) -> None:
        cut = join_shards(traced, layout, rank_group=rank_group)
        state = full_state_dict(cut)
        truth = traced.model.state_dict()
        assert list(state["model"]) == list(truth)
        assert state["model"]._metadata == truth._metadata
        load_full_state_dict(cut, state)  # as it is: nothing is turned
        again = full_state_dict(cut)["model"]
        assert all(torch.equal(again[name], truth[name]) for name in truth if isinstance(truth[name], Tensor))
        fresh = copy.deepcopy(traced.model)
        fresh.load_state_dict(state["model"])
        loaded = fresh.state_dict()
        assert all(torch.equal(loaded[name], truth[name]) for name in truth if isinstance(truth[name], Tensor))
        cut.close()

    for model in models:
        traced = trace_module(model, torch.randn(4, 6))
        run_ranks(2, rank, traced, lay_out(traced.graph, [2, 1]))


class OddlyNamed(nn.Module):
    """Its buffer is cut with the channels, whatever its name ends in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("my_extra_state", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.my_extra_state
        return out


def test_a_buffer_whose_name_ends_like_extra_state_is_collected_and_loaded() -> None:
    def rank(rank_group: RankGroup, traced: Traced, layout: Layout) -> None:
        cut = join_shards(traced, layout, rank_group=rank_group)
        state = full_state_dict(cut)
        assert torch.equal(state["model"]["my_extra_state"], torch.arange(4.0))
        state["model"]["my_extra_state"] += 1
        load_full_state_dict(cut, state)
        assert torch.equal(full_state_dict(cut)["model"]["my_extra_state"], torch.arange(4.0) + 1)
        cut.close()

    traced = trace_module(OddlyNamed(), torch.randn(4, 6))
    run_ranks(2, rank, traced, lay_out(traced.graph, [2, 2]))


@pytest.mark.parametrize("entry", [{"seed": 1}, {"seed": "1", "passes": 2}, [1, 2], "x"], ids=str)
def test_a_damaged_count_of_dropout_changes_nothing(entry: object) -> None:
    def rank(rank_group: RankGroup) -> None:
        with cut(rank_group, "small", TWO) as (model, _):
            before = full_state_dict(model)
            state: dict[str, Any] = {**before, "dropout": entry}
            state["model"] = {name: torch.zeros_like(value) for name, value in before["model"].items()}
            with pytest.raises(CheckpointError, match=r"'dropout' is .*Nothing was changed"):
                load_full_state_dict(model, state)
            agree(full_state_dict(model)["model"], before["model"])

    run_ranks(2, rank)
