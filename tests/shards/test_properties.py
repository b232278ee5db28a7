"""Random networks of all layers, cut in random unequal shares by random costs, train exactly as on one device."""

import copy
import random
from collections.abc import Iterator
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenly.comm import RankGroup
from evenly.graph import Traced, trace_module
from evenly.layouts import TransferCosts, lay_out
from evenly.layouts.search import Search
from evenly.shards import join_shards
from evenly.spec.layout import Layout
from tests.ranks import run_ranks
from tests.shards.compare import SGD, compare
from tests.shards.grammar import Sample, sample

ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-2)  # with a small eps, rounding of zero gradients would be a step
SHARE = st.sampled_from([1, 1, 2, 5, 70, 25, 0.3, 3.7, 0.01, 1e-3])
SHARES = st.lists(SHARE, min_size=2, max_size=4)
RATES = st.builds(
    TransferCosts,
    flops_per_byte=st.sampled_from([0.0, 1e-3, 1.0, 100.0, 1e5]),
    flops_per_message=st.sampled_from([0.0, 1.0, 2e4, 1e9]),
)
SEEDS, BLOCKS = st.integers(0, 10**9 - 1), st.integers(1, 6)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The ranks are threads already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(one: Sample, shares: list[float], **settings: Any) -> None:
    note(f"{one.model}\nexample {[tuple(x.shape) for x in one.example]}, shares {shares}, {settings}")
    build = lambda: copy.deepcopy(one.model)  # noqa: E731
    compare(build, one.example, shares, smaller=one.can_be_smaller, **settings)


@pytest.mark.parametrize("lot", range(3))
@settings(max_examples=8)
@given(SEEDS, BLOCKS, SHARES, RATES, st.sampled_from([SGD, ADAM]), st.booleans())
def test_any_network_trains_as_on_one_device(
    lot: int, seed: int, blocks: int, shares: list[float], rates: TransferCosts, optimizer: Any, cut_batch: bool
) -> None:
    check(sample(seed + lot * 10**9, blocks), shares, rates=rates, optimizer=optimizer, cut_batch=cut_batch)


@pytest.mark.parametrize("lot", range(3, 5))
@settings(max_examples=8)
@given(SEEDS, BLOCKS, SHARES, st.booleans())
def test_any_layout_gives_the_same_numbers(
    lot: int, seed: int, blocks: int, shares: list[float], cut_batch: bool
) -> None:
    """With costs drawn at random the layout is any of those that the rules allow, not a sensible one."""

    def cost(_: Search, scene: Any, option: Any) -> float:
        return 1e9 * random.Random(f"{seed} {scene.layer.name} {option.mode} {option.needs}").random()

    with patch.object(Search, "_work", cost):
        check(sample(seed + lot * 10**9, blocks), shares, cut_batch=cut_batch)


@settings(max_examples=6)
@given(SEEDS, BLOCKS, SHARES, st.data())
def test_layers_may_have_shares_of_their_own_and_ranks_none(
    seed: int, blocks: int, shares: list[float], data: st.DataObject
) -> None:
    one = sample(seed, blocks)
    shares = [*shares, 0] if data.draw(st.booleans()) else shares
    graph = trace_module(one.model, one.example).graph
    names = sorted({layer.where for layer in graph.layers if layer.kind == "mixing" and layer.where})
    own = [data.draw(st.sampled_from([0, 1, 3])) if share else 0 for share in shares]
    layers = {data.draw(st.sampled_from(names)): own} if names and any(own) else None
    check(one, shares, layer_shares=layers, rates=TransferCosts(1.0, 1.0))


class Dropping(nn.Module):
    """Every place where dropout stands in networks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.drop, self.channels = nn.Dropout(0.3), nn.Dropout2d(0.4)
        self.layer = nn.TransformerEncoderLayer(6, 3, 8, 0.2, batch_first=True)
        self.attend = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.norm(self.conv(x))))
        x = self.layer(self.channels(x).flatten(2).transpose(1, 2))
        x = x + self.attend(x, x, x)[0]
        return nn.functional.dropout(self.head(x), 0.5, training=self.training)


def dropped(rank_group: RankGroup, traced: Traced, layout: Layout, example: Tensor) -> list[Tensor]:
    """Returns what two steps and an evaluation give."""
    model = join_shards(traced, layout, rank_group=rank_group, timeout_s=30)
    outputs = []
    try:
        for _ in range(2):
            outputs.append(model(example))
            outputs[-1].square().sum().backward()
        outputs.append(model.eval()(example))
    finally:
        model.close()
    return [output.detach() for output in outputs]


@cache
def dropped_alone() -> tuple[Traced, Tensor, list[Tensor]]:
    """Returns the network, its example, and what it gives on one rank; the generator is seeded before."""
    example = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    traced = trace_module(Dropping().double(), example)
    return traced, example, run_ranks(1, dropped, traced, lay_out(traced.graph, [1]), example)[0]


@settings(max_examples=5)
@given(SHARES, RATES)
def test_dropout_does_not_depend_on_the_shares(shares: list[float], rates: TransferCosts) -> None:
    torch.manual_seed(0)  # from which the seed of dropout is taken too
    traced, example, alone = dropped_alone()
    assert not torch.allclose(alone[0], alone[1])
    for found in run_ranks(len(shares), dropped, traced, lay_out(traced.graph, shares, rates=rates), example):
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
