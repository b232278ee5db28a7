"""Which layout a network gets: narrow tensors travel, whole heads and groups stay, and the cheapest way is found."""

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from evenly.errors import SpecError
from evenly.graph import trace
from evenly.layouts import TransferCosts, lay_out, relaid
from evenly.layouts.cuts import DimCuts
from evenly.layouts.search import Search, SearchPath
from evenly.spec.graph import Graph
from evenly.spec.layout import Layout
from tests import zoo
from tests.shards.grammar import sample

SHARES = [3, 2, 1]
FEW_WAYS = (3, 6, 12, 27, 41, 46, 55, 60, 71, 74, 75, 92, 104, 113)  # networks small enough to try every way

pytestmark = pytest.mark.timeout(300)


def hollow(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def graph_of(build: Any, *shape: int) -> Graph:
    """Returns the graph of a network of true size, built without memory."""
    with torch.device("meta"):
        return trace(build(), torch.empty(shape))


def modes_of(graph: Graph, layout: Layout, op: str) -> dict[str, str]:
    """Returns the mode of every operation of one kind, by its module."""
    layers = {layer.name: layer for layer in graph.layers}
    return {layers[c.layer].where: c.mode for c in layout.choices if layers[c.layer].op == op}


def widest_move(graph: Graph, layout: Layout) -> int:
    """Returns the most channels of a feature map that travels."""
    shapes = {move.tensor: graph.tensors[move.tensor].shape for move in layout.moves if move.forward_bytes}
    return max(shape[1] for shape in shapes.values() if len(shape) == 4 and shape[2] > 1)


def bottlenecks() -> nn.Module:
    blocks = [zoo.Bottleneck(256, 64, 64, 1, 1, nn.BatchNorm2d, None) for _ in range(2)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    return hollow(nn.Conv2d(3, 256, 3, padding=1), *blocks, *head)


def test_of_a_bottleneck_only_the_narrow_tensors_travel() -> None:
    graph = graph_of(bottlenecks, 32, 3, 56, 56)
    layout = lay_out(graph, SHARES)
    modes = modes_of(graph, layout, "conv")
    assert [modes[f"2.conv{i}"] for i in (1, 3)] == ["reduced", "partitioned"]
    assert widest_move(graph, layout) == 64  # never the stream of 256
    names = {layer.where: layer.name for layer in graph.layers if layer.op == "conv"}
    pairs = {names[f"{block}.conv{i}"]: [mode] for block in (1, 2) for i, mode in ((1, "partitioned"), (3, "reduced"))}
    assert layout.traffic_bytes <= 0.4 * lay_out(graph, SHARES, modes=pairs).traffic_bytes


def test_an_inverted_bottleneck_is_a_pair_around_its_depthwise_conv() -> None:
    def build() -> nn.Module:
        blocks = [zoo.InvertedResidual(32, 32, 1, 6) for _ in range(2)]
        return hollow(nn.Conv2d(3, 32, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    graph = graph_of(build, 32, 3, 28, 28)
    layout = lay_out(graph, SHARES)
    modes = modes_of(graph, layout, "conv")
    assert [modes[f"2.conv.{i}"] for i in ("0.0", "1.0", "2")] == ["partitioned", "grouped", "reduced"]
    assert widest_move(graph, layout) == 32  # never the 192 inside


def test_a_transformer_block_is_two_pairs_and_heads_stay_whole() -> None:
    graph = graph_of(lambda: hollow(*[zoo.FusedAttentionBlock(192, 6, 768, 0.0) for _ in range(2)]), 32, 64, 192)
    layout = lay_out(graph, SHARES)
    modes = modes_of(graph, layout, "linear")
    order = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]
    assert [modes[f"1.{name}"] for name in order] == ["partitioned", "reduced", "partitioned", "reduced"]
    assert set(modes_of(graph, layout, "attention").values()) == {"local"}
    parts = next(cut for cut in layout.cuts if cut.size == 3 * 192)
    assert parts.counts() == [3 * 32 * heads for heads in (3, 2, 1)]
    assert all(edge % 32 == 0 for part in parts.segments for segment in part for edge in segment)
    assert [len(part) for part in parts.segments] == [3, 3, 3]  # of queries, keys and values


def test_a_dense_block_is_never_put_together() -> None:
    def build() -> nn.Module:
        return hollow(nn.Conv2d(3, 64, 3, padding=1), zoo.DenseBlock(3, 64, 32, 4, 0.0), zoo.Transition(160, 80))

    graph = graph_of(build, 32, 3, 28, 28)
    layout = lay_out(graph, SHARES)
    assert set(modes_of(graph, layout, "concat").values()) == {"local"}
    assert set(modes_of(graph, layout, "batch_norm").values()) == {"local"}
    assert modes_of(graph, layout, "conv")["2.conv"] == "reduced"
    assert any(len(part) > 2 for cut in layout.cuts for part in cut.segments)  # a rank's channels lie apart


def test_a_pair_costs_the_same_whatever_the_shares() -> None:
    graph = graph_of(lambda: hollow(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), 32, 64)
    traffic = {lay_out(graph, shares).traffic_bytes for shares in ([1, 1], [9, 1], [0.3, 0.7])}
    assert traffic == {2 * 1 * 32 * 64 * 4}  # one sum of the output; the input needs no gradient


def test_early_layers_may_be_cut_along_the_batch_and_late_ones_along_their_channels() -> None:
    def build() -> nn.Module:
        convs = (nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.AdaptiveAvgPool2d(1))
        return hollow(*convs, nn.Flatten(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 10))

    graph = graph_of(build, 60, 3, 64, 64)
    layout, without = lay_out(graph, SHARES, cut_batch=True), lay_out(graph, SHARES)
    assert set(modes_of(graph, layout, "conv").values()) == {"bystander"}
    assert list(modes_of(graph, layout, "linear").values()) == ["partitioned", "reduced"]
    assert [cut.counts() for cut in layout.cuts if cut.rows] == [[30, 20, 10]]
    assert layout.traffic_bytes < 0.1 * without.traffic_bytes


def test_channels_are_dealt_out_in_proportion() -> None:
    graph = graph_of(lambda: hollow(nn.Conv2d(3, 60, 3), nn.ReLU(), nn.Conv2d(60, 8, 1)), 4, 3, 16, 16)
    counts = [cut.counts() for cut in lay_out(graph, [70, 25, 5]).cuts if cut.size == 60]
    assert counts == [[42, 15, 3]]


def test_a_rank_without_a_share_is_left_out() -> None:
    graph = graph_of(lambda: hollow(nn.Linear(8, 12), nn.Linear(12, 4)), 4, 8)
    layout = lay_out(graph, [2, 0, 1])
    assert layout.members == (0, 2)
    assert layout.shares == (2, 0, 1)
    assert all(len(cut.segments) == 2 for cut in layout.cuts)


def test_a_layer_may_have_shares_of_its_own() -> None:
    graph = graph_of(lambda: hollow(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), 4, 8)
    layout = lay_out(graph, [1, 1, 1], layer_shares={"0": [2, 0, 1]})
    assert [cut.counts() for cut in layout.cuts if cut.size == 12] == [[8, 0, 4]]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shares": [0, 0]}, "leave every rank out"),
        ({"shares": [1, -1]}, "at least 0"),
        ({"shares": [1, inf]}, "finite"),
        ({"shares": "ab"}, "list of numbers"),
        ({"shares": []}, "nothing"),
        ({"shares": [1, 1], "layer_shares": {"nowhere": [1, 1]}}, r"'nowhere'.*no module"),
        ({"shares": [1, 0], "layer_shares": {"0": [1, 1]}}, r"ranks \[1\] have no share"),
        ({"shares": [1, 1], "layer_shares": {"0": [1, 1, 1]}}, "3 shares .* for 2 ranks"),
    ],
)
def test_shares_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    graph = graph_of(lambda: hollow(nn.Linear(8, 12)), 4, 8)
    with pytest.raises(SpecError, match=said):
        lay_out(graph, settings.pop("shares"), **settings)


def test_the_modes_of_an_operation_may_be_chosen() -> None:
    graph = graph_of(lambda: hollow(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), 4, 8)
    layout = lay_out(graph, SHARES, modes={"linear": ["reduced"], "linear_1": ["partitioned"]})
    assert list(modes_of(graph, layout, "linear").values()) == ["reduced", "partitioned"]


@pytest.mark.parametrize("modes", [{"linear": ["grouped"]}, {"nowhere": ["reduced"]}])
def test_modes_that_cannot_be_are_refused(modes: dict[str, Sequence[str]]) -> None:
    graph = graph_of(lambda: hollow(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), 4, 8)
    with pytest.raises(SpecError, match=next(iter(modes))):
        lay_out(graph, SHARES, modes=modes)


def test_what_has_no_rule_is_computed_whole_and_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.lstm, self.last = nn.Linear(4, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.lstm(torch.fft.fft(self.first(x)).real)[0])

    graph = graph_of(Odd, 2, 7, 4)
    layout = lay_out(graph, SHARES)
    notes = {choice.layer: (choice.mode, choice.note) for choice in layout.choices if choice.note}
    assert notes["fft_fft"] == ("whole", "torch._C._fft:fft_fft has no rule")
    assert notes["recurrent"] == (
        "whole",
        "cutting the units of LSTM takes longer; cutting its batch is not possible here",
    )
    assert "torch._C._fft:fft_fft has no rule" in graph.explain()
    assert modes_of(graph, layout, "linear")["first"] != "whole"


@given(st.integers(0, 10**6), st.integers(1, 5))
@settings(max_examples=6)
def test_the_same_network_gets_the_same_layout_and_both_can_be_told_as_text(seed: int, blocks: int) -> None:
    model, example, _ = sample(seed, blocks)
    graph = trace(model, example)
    layout = lay_out(graph, SHARES, cut_batch=True)
    assert lay_out(trace(model, example), SHARES, cut_batch=True) == layout
    assert Graph.from_json(graph.to_json()) == graph
    assert Layout.model_validate_json(layout.model_dump_json()) == layout
    assert lay_out(Graph.from_json(graph.to_json()), SHARES, cut_batch=True) == layout


def test_processes_with_other_hashes_find_the_same_layout() -> None:
    code = f"import sys; sys.path.insert(0, '.'); from {__name__} import digest; print(digest())"
    root = Path(__file__).parents[2]
    started = [
        subprocess.Popen([sys.executable, "-c", code], cwd=root, env={"PYTHONHASHSEED": number}, stdout=subprocess.PIPE)
        for number in ("1", "2")
    ]
    assert [one.communicate(timeout=100)[0] for one in started] == [f"{digest()}\n".encode()] * 2


def digest() -> str:
    """Returns a short text that differs if any of a few layouts differs."""
    said = hashlib.sha256()
    for seed in range(8):
        model, example, _ = sample(seed, 3)
        said.update(lay_out(trace(model, example), SHARES, rates=TransferCosts(0.0, 0.0)).model_dump_json().encode())
    return said.hexdigest()


def costs(search: Search, most: int) -> list[float]:
    """Returns what every way through the network costs; nothing if there are more than `most`."""
    ways = [SearchPath(0.0, {})]
    for layer in search.graph.layers:
        ways = [
            SearchPath(step.cost_after(way.cost), {**way.states, **step.states}, way, step)
            for way in ways
            for step in search.steps(layer, [way.states.get(name) for name in layer.inputs])
        ]
        if len(ways) > most:
            return []
    return [way.cost for way in ways]


@pytest.mark.parametrize(
    "rates",
    [
        TransferCosts(),
        pytest.param(TransferCosts(1.0, 1.0), marks=pytest.mark.slow),
        pytest.param(TransferCosts(0.01, 1e5), marks=pytest.mark.slow),
        TransferCosts(0.0, 0.0),
    ],
    ids=str,
)
def test_no_way_is_cheaper_than_the_one_found(rates: TransferCosts) -> None:
    tried = 0
    for seed in FEW_WAYS:
        model, example, _ = sample(seed, 2 + seed % 2)
        search = Search(trace(model, example), DimCuts([5.0, 2.0]), rates, {}, {})
        if found := costs(search, 400):
            assert search.run().cost == pytest.approx(min(found), rel=1e-12), model
            tried += len(found) > 20
    assert tried >= 6


def test_wide_layers_get_new_shares_in_multiples_and_narrow_ones_exactly() -> None:
    network = lambda: nn.Sequential(nn.Conv2d(3, 320, 1), nn.ReLU(), nn.Conv2d(320, 30, 1), nn.Conv2d(30, 5, 1))  # noqa: E731
    graph = graph_of(network, 2, 3, 4, 4)
    modes = {layer.name: ["partitioned"] for layer in graph.layers if layer.op == "conv"}
    before = lay_out(graph, [5, 3, 2], modes=modes)
    for factors, narrow in (
        ([1.1, 1.0, 0.9], [16, 9, 5]),
        ([1.0, 1.2, 1.5], [13, 9, 8]),
        ([0.5, 0.6, 0.5], [14, 10, 6]),
    ):
        after = relaid(graph, before, factors, unit=16)  # the sum of all counts may be another one with the factors
        counts = {cut.size: cut.counts() for cut in after.cuts}
        assert [count % 16 for count in counts[320]] == [0, 0, 0]
        assert sorted(counts[320], reverse=True) == list(counts[320])
        assert list(counts[30]) == narrow
