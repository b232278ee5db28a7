"""What all ranks hold whole stays the same on them, or the monitor says what, where and by how much."""

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from evenly.comm import RankGroup
from evenly.errors import MismatchError, SpecError
from evenly.graph import trace_module
from evenly.layouts import lay_out
from evenly.shards import Sharded, join_shards, local_shard_of
from evenly.shards.verification.drift import DriftMonitor, _fingerprint
from tests.ranks import run_ranks

LOCK = threading.Lock()  # ranks are threads: torch's generator is one for all, and fx patches modules while it traces


class Small(nn.Module):
    """Layers to cut, and a scale and a buffer that all ranks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.noise = nn.Parameter(torch.zeros(5))
        self.register_buffer("offset", torch.linspace(-2, 1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
        return x * self.scale + self.noise + self.offset


@contextmanager
def small(rank_group: RankGroup, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Sharded, torch.Tensor]]:
    with LOCK:
        torch.manual_seed(3)
        model, x = Small().to(dtype), torch.randn(4, 3, 6, 6, dtype=dtype)
        traced = trace_module(model, x)
    shares = [70, 25, 5][: rank_group.size]
    sharded = join_shards(traced, lay_out(traced.graph, shares), rank_group=rank_group, timeout_s=30)
    try:
        yield sharded, x
    finally:
        sharded.close()


def disturb(tensor: torch.Tensor, rank_group: RankGroup, by: float, rank: int = 1) -> None:
    if rank_group.rank == rank:
        with torch.no_grad():
            tensor.view(-1)[0] += by


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_drifts_in_training_and_one_small_message_says_so(dtype: torch.dtype) -> None:
    def act(rank_group: RankGroup) -> tuple[list[Any], int, int, int]:
        with small(rank_group, dtype) as (model, x):
            monitor = DriftMonitor(model, every=2, limit=0.0)
            train(model, SGD(model.parameters(), lr=0.1, momentum=0.9), x, 3)
            model.shard_group.traffic.clear()
            drifts = monitor.measure()
            whole = sum(not local_shard_of(t).is_cut for t in (*model.parameters(), *model.buffers()))
            return drifts, model.shard_group.traffic.messages, model.shard_group.traffic.sent_bytes, whole

    for drifts, messages, sent_bytes, whole in run_ranks(3, act):
        assert (drifts, messages) == ([], 1)
        assert whole >= 3
        assert sent_bytes <= 2 * 3 * 8 * whole


@pytest.mark.parametrize(("name", "rank"), [("scale", 1), ("offset", 0), ("scale", 2)])
def test_a_drift_raises_on_all_ranks_and_names_tensor_ranks_and_size(name: str, rank: int) -> None:
    def act(rank_group: RankGroup) -> str:
        with small(rank_group) as (model, x):
            monitor = DriftMonitor(model, every=3)
            optimizer = SGD(model.parameters(), lr=0.0)
            handle = monitor.attach(optimizer)
            disturb(getattr(model, name), rank_group, 1e-5, rank)  # unlike larger ones it is let pass without a monitor
            train(model, optimizer, x, 2)
            with pytest.raises(MismatchError) as caught:
                train(model, optimizer, x, 1)
            handle.remove()
            train(model, optimizer, x, 3)
            return str(caught.value)

    size = 1e-5 / (2 if name == "offset" else 1)
    for text in run_ranks(3, act):
        assert text.startswith("after step 3 1 replicated tensors differ between ranks")
        assert f"{name!r} of ranks [{rank}] of the network is {size:.1e} of its size away" in text
        assert "mend()" in text


def test_a_drift_is_logged_where_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    def act(rank_group: RankGroup) -> None:
        with small(rank_group) as (model, _):
            disturb(model.scale, rank_group, 1e-3)
            DriftMonitor(model, every=1, action="log").step()

    with caplog.at_level(logging.WARNING, logger="evenly.shards.verification.drift"):
        run_ranks(2, act)
    assert len(caplog.messages) == 2
    assert all("'scale' of ranks [1]" in message for message in caplog.messages)


def test_small_drifts_pass_and_are_measured() -> None:
    def act(rank_group: RankGroup) -> list[Any]:
        with small(rank_group) as (model, _):
            disturb(model.scale, rank_group, 1e-8)
            disturb(model.noise, rank_group, 1e-12)  # a parameter around 0: measured by the largest of all
            monitor = DriftMonitor(model, every=1)
            monitor.step()
            return [(drift.name, drift.size, drift.ranks) for drift in monitor.measure()]

    for drifts in run_ranks(3, act):
        assert [(name, ranks) for name, _, ranks in drifts] == [("scale", (1,)), ("noise", (1,))]
        assert drifts[0][1] == pytest.approx(1e-8, rel=1e-3)
        assert drifts[1][1] == pytest.approx(1e-9, rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_a_drift(value: float) -> None:
    def act(rank_group: RankGroup) -> float:
        with small(rank_group) as (model, _):
            disturb(model.noise, rank_group, value)
            return DriftMonitor(model).measure()[0].size

    assert run_ranks(2, act) == [math.inf] * 2


def test_mending_gives_all_ranks_the_values_of_rank_0() -> None:
    def act(rank_group: RankGroup) -> Any:
        with small(rank_group) as (model, x):
            optimizer = Adam(model.parameters(), lr=0.1)
            monitor = DriftMonitor(model, every=1000)
            monitor.attach(optimizer)
            train(model, optimizer, x, 1)
            for tensor in (model.scale, model.noise, model.offset, optimizer.state[model.noise]["exp_avg"]):
                disturb(tensor, rank_group, 0.5)
                disturb(tensor, rank_group, math.nan, rank=2)
            before = model.conv.weight.clone(), id(model.scale)
            monitor.mend()
            assert torch.equal(model.conv.weight, before[0])
            assert id(model.scale) == before[1]
            left = monitor.measure()
            train(model, optimizer, x, 2)
            slots = [slot["exp_avg"].clone() for p, slot in optimizer.state.items() if not local_shard_of(p).is_cut]
            return left + monitor.measure(), [model.scale.clone(), model.noise.clone(), model.offset.clone(), *slots]

    (left, truth), *others = run_ranks(3, act)
    assert left == []
    for drifts, tensors in others:
        assert drifts == []
        assert all(torch.equal(mine, true) for mine, true in zip(tensors, truth, strict=True))


def test_one_rank_and_a_rank_without_a_share_have_nothing_to_compare() -> None:
    def act(rank_group: RankGroup, shares: list[int]) -> list[Any]:
        with LOCK:
            torch.manual_seed(3)
            traced = trace_module(Small(), torch.randn(4, 3, 6, 6))
        model = join_shards(traced, lay_out(traced.graph, shares), rank_group=rank_group, timeout_s=30)
        monitor = DriftMonitor(model, every=1)
        monitor.step()
        monitor.mend()
        drifts = monitor.measure()
        model.close()
        return drifts

    assert run_ranks(1, act, [1]) == [[]]
    assert run_ranks(3, act, [1, 0, 1]) == [[], [], []]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_single_change_of_a_bit_changes_the_fingerprint(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 5, 11).to(dtype)
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    first = _fingerprint(x)
    for place in range(len(x)):
        for bit in range(8 * dtype.itemsize - 1):
            other = x.clone()
            other.view(kinds[dtype.itemsize])[place] ^= 1 << bit
            assert _fingerprint(other) != first
    assert _fingerprint(x.flip(0)) != first
    assert _fingerprint(x.clone()) == first


@pytest.mark.parametrize("options", [{"every": 0}, {"limit": -1.0}, {"limit": math.nan}, {"action": "shout"}])
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"a DriftMonitor was asked for with .*Give"):
        DriftMonitor(None, **options)
