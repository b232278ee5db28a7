"""Networks have the parameters that are published for them, and give outputs of the right shape."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch

from evenly.errors import SpecError
from evenly.recipes.networks import NETWORKS, build_network
from tests.recipes.networks.small import NARROW, example

IMAGENET = {"classes": 1000, "size": 224}
PUBLISHED = [  # torchvision 0.24, or timm 1.0 for ViT, CaiT and DLA; with 1000 classes
    ("resnet18", IMAGENET, 11_689_512),
    ("resnet34", IMAGENET, 21_797_672),
    ("resnet50", IMAGENET, 25_557_032),
    ("resnet101", IMAGENET, 44_549_160),
    ("densenet121", IMAGENET, 7_978_856),
    ("mobilenetv2", IMAGENET, 3_504_872),
    ("shufflenetv2", IMAGENET, 2_278_604),
    ("efficientnet-b0", IMAGENET, 5_288_548),
    ("dla", IMAGENET, 15_742_104),
    ("vit", {**IMAGENET, "patch": 16}, 5_717_416),
    ("vit", {**IMAGENET, "patch": 16, "width": 768, "heads": 12}, 86_567_656),
    ("cait", {**IMAGENET, "patch": 16}, 11_956_264),
    ("swin", {**IMAGENET, "patch": 4, "window": 7}, 28_288_354),
    # He and others: 0.27 million; with convolutions as shortcuts (option B)
    ("resnet20", {"shortcut": "conv"}, 272_474),
    # Xie and others: 34.4 and 68.1 million
    ("resnext29", {"groups": 8, "group_width": 64, "stem_kernel": 3}, 34_426_698),
    ("resnext29", {"groups": 16, "group_width": 64, "stem_kernel": 3}, 68_155_210),
    # Trockman, Kolter: 707 thousand
    ("convmixer", {"kernel": 9, "patch": 1}, 706_570),
    # Radford and others: GPT-2 small
    ("gpt", {"vocabulary": 50257, "context": 1024, "width": 768, "depth": 12, "heads": 12, "bias": True}, 124_439_808),
]


def parameters_of(name: str, **options: object) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_network(name, **options).parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_parameters_of_the_table(name: str) -> None:
    assert parameters_of(name) == NETWORKS[name].parameters
    maker = getattr(import_module(NETWORKS[name].module), NETWORKS[name].function)
    documentation = (inspect.getdoc(maker) or "").replace(",", "")
    assert str(NETWORKS[name].parameters) in documentation


@pytest.mark.parametrize(("name", "options", "parameters"), PUBLISHED)
def test_published_sizes(name: str, options: dict[str, object], parameters: int) -> None:
    assert parameters_of(name, **options) == parameters


@pytest.mark.parametrize("name", NETWORKS)
def test_the_table_has_the_options_of_the_signature(name: str) -> None:
    info = NETWORKS[name]
    signature = inspect.signature(getattr(import_module(info.module), info.function))
    assert [key for key in signature.parameters if key not in ("classes", "channels", "size")] == list(info.options)


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs(name: str) -> None:
    sizes = {} if name == "gpt" else {"classes": 7}
    with torch.no_grad():
        outputs = build_network(name, **sizes, **NARROW[name])(*example(name, 2, torch.float32))
    expected = {"gpt": [(2, 8, 13)], "acgan-generator": [(2, 1, 28, 28)], "acgan-discriminator": [(2,), (2, 7)]}
    found = [tuple(x.shape) for x in (outputs if isinstance(outputs, tuple) else (outputs,))]
    assert found == expected.get(name, [(2, 7)])


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "dla", "mobilenetv2", "shufflenetv2", "efficientnet-b0"])
def test_large_images_are_reduced_early(name: str) -> None:
    small = build_network(name, channels=1, **NARROW[name])
    large = build_network(name, channels=1, size=64, **NARROW[name])
    with torch.no_grad():
        sides = [network.eval().features(torch.zeros(1, 1, 64, 64)).shape[-1] for network in (small, large)]
    assert sides[0] > sides[1] == 2


def test_images_of_other_sizes_and_channels() -> None:
    for name in ("vit", "cait", "lstm-rows", "published-cifar", "acgan-discriminator", "resnet20", "convmixer"):
        with torch.no_grad():
            outputs = build_network(name, channels=2, size=24, **NARROW[name])(torch.zeros(2, 2, 24, 24))
        assert outputs[-1].shape[-1] == 10


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("vgg16", {"size": 28}, "poolings need at least 32 x 32"),
        ("vit", {"size": 30}, "size 30 and patch 4, but 30 is no multiple of 4"),
        ("vit", {"heads": 5}, "width 192 and heads 5"),
        ("swin", {"window": 3}, "side of a stage 16 and window 3"),
        ("swin", {"heads": (3, 6)}, "Give as many heads as depths"),
        ("swin", {"size": 36}, "side of a stage 18 and window 4"),
        ("shufflenetv2", {"filters": (8, 8)}, "it has 3 stages"),
        ("shufflenetv2", {"filters": (8, 9, 8)}, "filters 9 and halves 2"),
        ("acgan-generator", {"size": 30}, "size 30 and upsampling 4"),
    ],
)
def test_sizes_that_do_not_fit_are_named(name: str, options: dict[str, object], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        parameters_of(name, **options)


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(SpecError, match="was given 9 tokens a sample, but its context is 8"):
        build_network("gpt", **NARROW["gpt"])(torch.zeros(1, 9, dtype=torch.int64))


def test_a_generator_depends_on_noise_and_class() -> None:
    torch.manual_seed(0)
    generator = build_network("acgan-generator", **NARROW["acgan-generator"]).eval()
    noise = torch.randn(1, 6).expand(2, -1)
    images = generator(noise, torch.tensor([1, 2]))
    assert images.abs().max() <= 1
    assert not torch.equal(images[0], images[1])
    assert torch.equal(*generator(noise, torch.tensor([3, 3])))


def test_characters_do_not_see_those_after_them() -> None:
    torch.manual_seed(0)
    model = build_network("gpt", **NARROW["gpt"]).eval()
    tokens = torch.randint(13, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 13
    same = (model(tokens) - model(changed)).abs().amax(-1)[0] < 1e-6
    assert same.tolist() == [True] * 5 + [False] * 3


def test_shifted_windows_attend_only_to_neighbours() -> None:
    """A change in one corner does not reach the opposite corner, which the shift puts into the same window."""
    torch.manual_seed(0)
    model = build_network("swin", width=6, depths=(2,), heads=(3,))
    image = torch.randn(1, 3, 32, 32)
    changed = image.clone()
    changed[..., :2, :2] += 1
    with torch.no_grad():
        tokens, others = (
            model.stages(model.first_norm(model.patches(x).permute(0, 2, 3, 1))) for x in (image, changed)
        )
    differs = (tokens - others).abs().amax(-1)[0] > 0  # [16, 16]
    assert differs[:6, :6].any()
    assert not differs[6:].any()
    assert not differs[:, 6:].any()


def test_the_page_has_every_network() -> None:
    """`python scripts/networks-table.py` writes the table; what is cut is trained in test_exactness.py."""
    page = (Path(__file__).parents[3] / "docs" / "recipes" / "networks.md").read_text()
    rows = [line.split(" | ")[:4] for line in page.splitlines() if line.startswith("| `")]
    expected = [
        [f"| `{name}`", f"{info.parameters:,}", info.source, ", ".join(f"`{option}`" for option in info.options)]
        for name, info in NETWORKS.items()
    ]
    assert rows == expected
