"""Every network, cut over unequal ranks, trains exactly as on one device."""

from collections.abc import Iterator

import pytest
import torch

from evenly.layouts import TransferCosts
from evenly.recipes.networks import NETWORKS, build_network
from evenly.spec.layout import Layout
from tests.recipes.networks.small import NARROW, example
from tests.shards.compare import compare

CHEAP = ("small-resnet", "convmixer")
FREE = TransferCosts(flops_per_byte=0.0, flops_per_message=0.0)  # else so few units of an LSTM are computed whole


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The ranks are threads already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained_on_two_ranks(name: str) -> Layout:
    rates = FREE if name == "lstm-rows" else None
    return compare(lambda: build_network(name, **NARROW[name]).double(), example(name), [5, 3], steps=2, rates=rates)


@pytest.mark.parametrize("name", CHEAP)
def test_small_networks_train_as_on_one_device(name: str) -> None:
    assert not any(choice.note for choice in trained_on_two_ranks(name).choices)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in CHEAP])
def test_every_network_trains_as_on_one_device(name: str) -> None:
    assert not any(choice.note for choice in trained_on_two_ranks(name).choices)


@pytest.mark.slow
def test_a_large_image_and_three_ranks() -> None:
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    layout = compare(lambda: build_network("resnet18", size=64, width=4).double(), images, [70, 25, 5], steps=2)
    assert layout.members == (0, 1, 2)
