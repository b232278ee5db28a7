"""Every network of the zoo, cut over unequal ranks, trains exactly as on one device."""

from typing import Any

import pytest
import torch
from torch import nn

from evenly.spec.layout import Layout
from tests.shards.compare import compare
from tests.zoo import ZOO

SHARES = [70, 25, 5]
SETTINGS: dict[str, dict[str, Any]] = {  # where they are not the common ones
    "vgg16": {"layer_shares": {"features.0": [1, 0, 1], "classifier": [0, 3, 2]}},
    "resnet18": {"shares": [1, 2]},
    "resnet18_gn": {"shares": [3, 2, 2, 1]},
    "resnext50": {"shares": [5, 3]},
    "se_resnet34": {"shares": [2, 1]},
    "densenet121": {"shares": [2, 1]},
    "mobilenet_v2": {"shares": [5, 4]},
    "shufflenet_v2": {"shares": [2, 1]},
    "googlenet": {"shares": [1, 3]},
    "wide_conv": {"shares": [40, 30, 20, 10], "cut_batch": True},
    "convmixer": {"shares": [9, 0, 5]},
    "convnext_small": {"shares": [3, 2]},
    "unet_nearest": {"shares": [3, 2, 1], "cut_batch": True},
    "unet_bilinear": {"shares": [0.2, 0.7]},
    "vit_small_fused": {"shares": [3, 1]},
    "mlp_mixer": {"shares": [1, 1]},
    "gpt2": {"shares": [4, 3, 2, 1]},  # 3 heads of keys for 4 ranks: one has no part in attention
    "gpt2_loss": {"shares": [2, 1], "layer_shares": {"blocks.0.attn": [0, 1]}},
    "gpt2_separate_tied": {"shares": [3, 2]},
    "autoencoder1d": {"shares": [1e-3, 1, 1]},
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """The ranks are threads already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ZOO)
def test_a_network_trains_as_on_one_device(name: str) -> None:
    torch.manual_seed(1)
    settings = {"shares": SHARES, **SETTINGS.get(name, {})}
    layout = compare(ZOO[name].build, ZOO[name].example(), settings.pop("shares"), **settings)
    assert cut_modes(layout), "no layer was cut"


def cut_modes(layout: Layout) -> list[str]:
    return [choice.mode for choice in layout.choices if choice.mode not in ("source", "whole")]


@pytest.mark.parametrize("shares", [[70, 25, 5], [1]], ids=["three", "alone"])
@pytest.mark.parametrize("steps", [4])
def test_more_steps_and_another_optimizer(shares: list[float], steps: int) -> None:
    torch.manual_seed(1)
    case = ZOO["autoencoder1d"]
    compare(case.build, case.example(), shares, steps=steps, optimizer=torch.optim.AdamW)


def test_gradients_reach_an_input_that_asks_for_them() -> None:
    torch.manual_seed(1)
    (image,) = ZOO["resnet18_gn"].example()
    layout = compare(ZOO["resnet18_gn"].build, image.requires_grad_(), SHARES, steps=2)
    assert layout.members == (0, 1, 2)


def test_a_rank_may_get_nothing_of_narrow_layers() -> None:
    """Two channels, two heads, two classes: the others of four ranks pass zeros on and still take part in sums."""

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 2)
            self.attend = nn.TransformerEncoderLayer(2, 2, 2, 0.0, batch_first=True)
            self.norm = nn.GroupNorm(1, 2)
            self.conv = nn.Conv1d(2, 2, 3, padding=1)
            self.head = nn.Linear(2, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.attend(self.embed(ids)).transpose(1, 2)
            return self.head(torch.relu(self.conv(self.norm(x))).mean(-1))

    layout = compare(lambda: Narrow().double(), torch.randint(5, (4, 3)), [5, 3, 3, 1])
    assert any(0 in cut.counts() for cut in layout.cuts)


def test_the_example_may_be_named_arguments() -> None:
    torch.manual_seed(1)
    ids, targets = ZOO["nanogpt"].example()
    build = lambda: ZOO["gpt2_separate_tied"].build()  # noqa: E731
    compare(build, {"targets": targets, "idx": ids}, [3, 1], steps=2)


def test_sixteen_bit_messages_are_predicted_too() -> None:
    build = lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(1, 6), nn.ReLU(), nn.Conv2d(6, 5, 1)).bfloat16()  # noqa: E731
    compare(build, torch.randn(3, 2, 5, 5).bfloat16(), [2, 1], tolerance=0.1)
