"""`verify` finds a cut network equal to the uncut one, or names the first layer that is not."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, Adam

from evenly.comm import MOVES, RankGroup
from evenly.errors import MismatchError, SpecError
from evenly.graph import Traced, trace_module
from evenly.layouts import lay_out
from evenly.shards import Adafactor, Sharded, join_shards, local_shard_of
from evenly.shards.verification.comparison import Report, verify
from tests.ranks import RankError, run_ranks
from tests.zoo import ZOO

LOCK = threading.Lock()  # ranks are threads: torch's generator is one for all, and fx patches modules while it traces
Made = tuple[nn.Module, Sharded, Any]


class Small(nn.Module):
    """Convolutions with batch norm, a bias in front of it, dropout of three kinds, and nested outputs."""

    def __init__(self, dropout: float = 0.4) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.second = nn.Conv2d(12, 16, 3, padding=1)
        self.drop, self.p = nn.Dropout(dropout), dropout
        self.third = nn.Conv2d(16, 8, 3)
        self.head = nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = self.drop(torch.relu(self.norm(self.first(x))))
        x = F.dropout(torch.relu(self.second(x)), self.p, training=self.training)
        x = torch.relu(self.third(x)).mean((2, 3))
        y = self.head(x) * self.scale
        return {"scores": y, "parts": (x, y.argmax(1))}


class Single(nn.Module):
    """A network that insists on its type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.float())


class Always(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x), 0.2)


def draw(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    if name == "always":
        return Always(), torch.randn(4, 6)
    if name == "single":
        return Single(), torch.randn(4, 6)
    if not name.startswith("small"):
        return ZOO[name].build(), ZOO[name].example()
    dtype = {"small": torch.float64, "small32": torch.float32, "small16": torch.bfloat16}[name]
    return Small().to(dtype), torch.randn(4, 3, 7, 7, dtype=dtype)


@cache
def followed(name: str) -> tuple[Traced, Any]:
    """Returns what `draw` returns with the network traced."""
    model, example = draw(name)
    return trace_module(model, example), example


@contextmanager
def opened(
    rank_group: RankGroup, name: str = "small", shares: list[int] | None = None, **options: Any
) -> Iterator[Made]:
    with LOCK:
        traced, example = followed(name)
        model = copy.deepcopy(traced.model)
    layout = lay_out(traced.graph, shares or [70, 25, 5][: rank_group.size], **options)
    sharded = join_shards(traced, layout, rank_group=rank_group, timeout_s=30)
    try:
        yield model, sharded, example
    finally:
        sharded.close()


def check(
    rank_group: RankGroup, change: Callable[..., None] | None = None, name: str = "small", **options: Any
) -> Report:
    """Returns the report on a network that `change` has had its way with."""
    with opened(rank_group, name) as (model, sharded, example):
        if change is not None:
            with torch.no_grad():
                change(sharded, rank_group.rank)
        return verify(model, sharded, example, **options)


def agreed(reports: list[Report]) -> Report:
    assert all(report == reports[0] for report in reports)
    return reports[0]


@pytest.mark.parametrize(
    ("name", "ranks"), [("small", 3), ("small", 1), ("resnet18", 3), ("convmixer", 2), ("gpt2_separate_tied", 2)]
)
def test_networks_that_are_cut_are_the_same(name: str, ranks: int) -> None:
    report = agreed(run_ranks(ranks, check, None, name))
    assert report.ok, str(report)
    assert report.layer is None
    assert (report.rtol, report.worst <= 1e-10) == (1e-9, True), str(report)
    assert [row.what for row in report.rows] == ["state", "outputs", "gradients", "buffers", "parameters"]
    assert str(report).startswith("the cut network is the same as the uncut one: worst difference")
    if name == "small":
        assert [row.count for row in report.rows] == [15, 3, 12, 3, 12]
        assert report.notes == ("dropout functions were switched off by the evaluation mode of 'the network itself'",)


@pytest.mark.parametrize(("name", "rtol"), [("small32", 1e-4), ("small16", 2e-2)])
def test_shorter_numbers_have_wider_limits(name: str, rtol: float) -> None:
    report = agreed(run_ranks(3, check, None, name))
    assert report.rtol == rtol
    assert report.ok, str(report)


def test_a_network_that_cannot_have_longer_numbers_is_compared_without() -> None:
    report = agreed(run_ranks(2, check, None, "single"))
    assert report.ok, str(report)
    assert report.notes == ("the rounding error of the uncut network is not known: it does not run in float64",)


def test_a_batch_that_is_cut_is_the_same() -> None:
    def act(rank_group: RankGroup) -> Report:
        with opened(rank_group, "autoencoder1d", cut_batch=True) as (model, sharded, example):
            assert any(cut.rows for cut in sharded.layout.cuts)
            return verify(model, sharded, example)

    report = agreed(run_ranks(3, act))
    assert report.ok, str(report)


@pytest.mark.parametrize("build", [lambda p: Adam(p, lr=0.1), lambda p: Adafactor(p, lr=0.1)])
def test_the_step_can_be_that_of_any_optimizer(build: Callable[..., Any]) -> None:
    def act(rank_group: RankGroup) -> Report:
        return check(rank_group, optimizer=build, loss=lambda outputs: outputs["scores"].square().mean())

    report = agreed(run_ranks(3, act))
    assert report.ok, str(report)


def test_all_is_left_as_it_was() -> None:
    def act(rank_group: RankGroup) -> None:
        with opened(rank_group, shares=[1] * rank_group.size) as (model, sharded, example):
            for network in (model, sharded):
                network.eval()
                network.norm.train()
                network.drop.p = 0.3
                for parameter in network.parameters():
                    parameter.grad = torch.full_like(parameter, 0.25)
            optimizer = SGD(sharded.parameters(), lr=0.1, momentum=0.9)
            optimizer.step()
            with torch.no_grad():
                for parameter in sharded.parameters():
                    parameter += 0.025  # what the step took
            before = [snapshot(network) for network in (model, sharded)]
            slots, chance = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
            for change in (0.0, 1.0):
                with torch.no_grad():
                    sharded.third.weight += change
                before[1] = snapshot(sharded)
                report = verify(model, sharded, example)
                assert report.ok == (not change), str(report)
                for network, then in zip((model, sharded), before, strict=True):
                    assert_same(snapshot(network), then)
            assert_same(flat(optimizer.state_dict()), flat(slots))
            assert rank_group.size > 1 or torch.equal(torch.get_rng_state(), chance)
            assert sharded._program.listener is None

    run_ranks(1, act)
    run_ranks(2, act)


def snapshot(network: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in network.named_parameters()}
    found |= {f"{name} grad": p.grad.clone() for name, p in network.named_parameters()}
    found |= {f"{name} id": (id(p), id(p.grad)) for name, p in network.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in network.named_buffers()}
    found |= {f"{name} mode": (m.training, getattr(m, "p", None)) for name, m in network.named_modules() if name}
    return found | {"mode": network.training, "passes": getattr(getattr(network, "_dropout_stream", None), "passes", 0)}


def flat(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{key} {name}": value for key, slot in state["state"].items() for name, value in slot.items()}


def assert_same(now: dict[str, Any], then: dict[str, Any]) -> None:
    assert now.keys() == then.keys()
    for name, value in then.items():
        assert torch.equal(now[name], value) if isinstance(value, torch.Tensor) else now[name] == value, name


@pytest.mark.parametrize(
    ("rank", "name"),
    [(0, "first.weight"), (1, "norm.bias"), (0, "third.weight"), (1, "third.weight"), (0, "scale"), (1, "scale"),
     (1, "head.bias")],
)  # fmt: skip
def test_a_parameter_that_one_rank_has_changed_is_named(name: str, rank: int) -> None:
    def change(sharded: Sharded, own: int) -> None:
        if own == rank:
            sharded.get_parameter(name).as_subclass(torch.Tensor).view(-1)[0] += 1e-3

    report = agreed(run_ranks(2, check, change))
    assert not report.ok
    assert report.layer == (name.rpartition(".")[0] or name)
    assert (report.rows[0].what, report.rows[0].where) == ("state", name)
    assert report.worst > 1e-6
    assert f"not the same as the uncut one: first at {report.layer!r}, worst difference" in str(report)


def test_a_buffer_that_was_changed_is_named() -> None:
    def change(sharded: Sharded, own: int) -> None:
        if own == 1:
            sharded.norm.running_mean.as_subclass(torch.Tensor)[0] += 1e-3

    report = agreed(run_ranks(2, check, change))
    assert (report.ok, report.layer) == (False, "norm")
    assert [row.worst > report.rtol for row in report.rows] == [True, False, False, True, False]


def test_a_count_that_is_off_by_one_is_found() -> None:
    def change(sharded: Sharded, own: int) -> None:
        sharded.norm.num_batches_tracked += 1

    report = agreed(run_ranks(2, check, change))
    assert (report.ok, report.layer, report.rows[0].where) == (False, "norm", "norm.num_batches_tracked")


def moved(sharded: Sharded, move: str) -> list[str]:
    return [m.tensor for m in sharded.layout.moves if m.name == move]


def layers(sharded: Sharded) -> dict[str, Any]:
    return {t.name: layer for layer in sharded._program.traced.graph.layers for t in layer.outputs}


@pytest.mark.parametrize("name", ["small", "small32", "resnet18"])
def test_a_gather_with_the_wrong_way_back_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def act(rank_group: RankGroup) -> tuple[Report, str]:
        with opened(rank_group, name) as (model, sharded, example):
            known, order = layers(sharded), [step.name for step in sharded._program.steps]
            last = max(moved(sharded, "gather_for_ranks"), key=order.index)
            return verify(model, sharded, example), known[last].where or last

    monkeypatch.setitem(MOVES, "gather_for_ranks", MOVES["gather_for_all"])
    (report, layer), *others = run_ranks(3, act)
    assert others == [(report, layer)] * 2
    assert (report.ok, report.layer) == (False, layer), str(report)
    good = {row.what: row.worst <= report.rtol for row in report.rows}
    assert ("copies in float64" in str(report)) == (name == "small32")
    assert good == {"state": True, "outputs": True, "gradients": False, "buffers": True, "parameters": False}


def test_a_sum_that_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(rank_group: RankGroup) -> tuple[Report, list[str]]:
        with opened(rank_group) as (model, sharded, example):
            first = moved(sharded, "reduce")[0]
            users = [
                layer.where or layer.name for layer in sharded._program.traced.graph.layers if first in layer.inputs
            ]
            return verify(model, sharded, example), users

    monkeypatch.setitem(MOVES, "reduce", ("same", "same"))
    (report, users), *others = run_ranks(3, act)
    assert all(other == report for other, _ in others)
    assert not report.ok
    assert report.layer in users, str(report)
    assert not report.rows[1].worst <= report.rtol


def test_a_step_that_goes_wrong_is_named() -> None:
    def build(parameters: list[nn.Parameter]) -> Any:
        cut = local_shard_of(parameters[0]) is not None
        rest = [p for p in parameters if p.ndim != 4 or p.shape[2:] == (3, 3)]
        return SGD(rest, lr=0.11 if cut else 0.1)

    report = agreed(run_ranks(2, lambda rank_group: check(rank_group, optimizer=build)))
    assert not report.ok
    assert [row.worst > report.rtol for row in report.rows] == [False] * 4 + [True]
    assert report.layer in ("first", "scale")


def test_another_network_is_refused() -> None:
    def act(rank_group: RankGroup) -> None:
        with opened(rank_group) as (_, sharded, example), LOCK:
            other = Small().double()
            other.head = nn.Linear(8, 7).double()
            with pytest.raises(MismatchError, match=r"'head.weight' is \(6, 8\) in the cut network and \(7, 8\)"):
                verify(other, sharded, example)
            other.head = nn.Sequential(nn.Linear(8, 6))
            with pytest.raises(MismatchError, match=r"'head.0.weight' is absent in the cut network and \(6, 8\)"):
                verify(other, sharded, example)

    run_ranks(1, act)


def test_dropout_that_is_always_on_is_refused() -> None:
    with pytest.raises(RankError, match=r"dropout at 'dropout' is on in every mode.*training=self.training") as caught:
        run_ranks(2, check, None, "always")
    assert all(isinstance(error, SpecError) for error in caught.value.errors)


def test_a_rank_without_a_share_is_told_the_report() -> None:
    def act(rank_group: RankGroup, by: float) -> Report:
        with opened(rank_group, shares=[3, 0, 1]) as (model, sharded, example):
            if rank_group.rank == 2:
                with torch.no_grad():
                    sharded.second.weight += by
            return verify(model, sharded, example)

    assert agreed(run_ranks(3, act, 0.0)).ok
    assert agreed(run_ranks(3, act, 0.1)).layer == "second"
