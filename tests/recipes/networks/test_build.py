"""A network is found by its name, with options that are checked; other networks are imported."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenly.errors import SpecError
from evenly.recipes.networks import NETWORKS, build_network

TIMM = """
from types import SimpleNamespace
from torch import nn

__version__ = "1.0"
NAMES = {"resnet18": False, "vit_tiny_patch16_224": True}

def is_model(name):
    return name in NAMES

def list_models():
    return list(NAMES)

def get_pretrained_cfg(name):
    return SimpleNamespace(fixed_input_size=NAMES[name])

def create_model(name, *, num_classes, in_chans, **options):
    network = nn.Linear(in_chans, num_classes)
    network.options = options
    return network
"""
OWN = """
from torch import nn

def fixed():
    return nn.Linear(2, 3)

def sized(classes, width=4, *, size=1):
    return nn.Linear(width * size, classes)

def anything(**options):
    return nn.Linear(len(options), 1)

def positional(classes, /, width=1):
    return nn.Linear(1, 1)

class Net(nn.Linear):
    def __init__(self, channels=1, classes=2):
        super().__init__(channels, classes)
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_networks.py").write_text(OWN)
    return str(tmp_path / "own_networks.py")


@pytest.fixture
def timm_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a package with the functions of timm that are used; the real one cannot be installed everywhere."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    return tmp_path / "timm.py"


def told_by(name: str, **options: Any) -> str:
    with pytest.raises(SpecError) as caught:
        build_network(name, **options)
    return str(caught.value)


def test_listing_needs_no_torch() -> None:
    code = "import sys; from evenly.recipes.networks import NETWORKS; print(len(NETWORKS), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(len(NETWORKS)), "False"], done.stderr


def test_classes_channels_size_and_options() -> None:
    network = build_network("resnet20", classes=7, channels=2, width=4)
    assert network(torch.zeros(1, 2, 28, 28)).shape == (1, 7)
    assert build_network("densenet121", blocks=[1, 1], growth=4)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert build_network("lstm-rows", hidden=4)(torch.zeros(1, 1, 28, 28)).shape == (1, 10)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("resnet-18", {}, "there is no network 'resnet-18'. Did you mean 'resnet18'? Choose one of: vgg16,"),
        ("GPT", {}, "Did you mean 'gpt'?"),
        ("cooking", {}, "there is no network 'cooking'. Choose one of"),
        ("", {}, "there is no network ''"),
        (
            "vit",
            {"hidden": 3},
            "the network 'vit' has no option 'hidden'. It has: patch, width, depth, heads, dropout.",
        ),
        ("vit", {"haeds": 3}, "has no option 'haeds'. Did you mean 'heads'?"),
        ("vit", {"width": "wide"}, "'vit' was given width='wide', but that is not what it takes: Input should be"),
        ("vit", {"depth": 0}, "'vit' was given depth=0. Give whole numbers of at least 1."),
        ("vit", {"dropout": 1}, "'vit' was given dropout=1. Give a rate from 0 to below 1."),
        ("vit", {"dropout": float("nan")}, "Give a rate from 0 to below 1"),
        ("mobilenetv2", {"width": -0.5}, "width=-0.5. Give a factor above 0"),
        ("densenet121", {"blocks": [1, 0]}, "Give whole numbers of at least 1"),
        ("resnet20", {"shortcut": "none"}, "Input should be 'pad' or 'conv'"),
        ("resnet18", {"classes": 0}, "'resnet18' was given classes=0"),
        ("resnext29", {"stem_kernel": 2, "width": -1}, "width=-1"),
        (
            "gpt",
            {"classes": 10, "size": 32},
            "'gpt' was asked for with classes=10, size=32, but it is not made for images",
        ),
    ],
)
def test_wrong_names_and_options(name: str, options: dict[str, Any], told: str) -> None:
    assert told in told_by(name, **options)


def test_a_callable_of_your_own_gets_what_it_names(own_file: str) -> None:
    sizes = {"classes": 5, "channels": 3, "size": 2}
    assert build_network(f"{own_file}:fixed", **sizes).out_features == 3
    sized = build_network(f"{own_file}:sized", **sizes, width=3)
    assert (sized.in_features, sized.out_features) == (6, 5)
    assert build_network(f"{own_file}:anything", **sizes, a=1, b=2).in_features == 2
    assert build_network(f"{own_file}:Net", **sizes).in_features == 3
    assert build_network(f"{own_file}:Net").in_features == 1
    assert isinstance(build_network("own_networks:Net", classes=4), nn.Linear)
    assert "has no option 'widht'. Did you mean 'width'? It has: width." in told_by(f"{own_file}:sized", widht=3)
    assert "has no option 'a'. It has none: leave it out." in told_by(f"{own_file}:fixed", a=3)
    assert "calling it raised TypeError" in told_by(f"{own_file}:positional", classes=3)
    assert "has no 'Nobody'" in told_by(f"{own_file}:Nobody")


def test_timm_networks_get_classes_channels_and_size(timm_folder: Path) -> None:
    timm_folder.write_text(TIMM)
    network = build_network("timm:resnet18", classes=5, channels=1, size=28, drop_rate=0.1)
    assert (network.in_features, network.out_features, network.options) == (1, 5, {"drop_rate": 0.1})
    assert build_network("timm:vit_tiny_patch16_224", size=64).options == {"img_size": 64}
    assert "timm 1.0 has no 'resnet81'. Choose one of timm.list_models(), such as resnet18." in told_by("timm:resnet81")
    assert "calling it raised TypeError" in told_by("timm:resnet18", num_classes=3)


def test_timm_that_is_missing_or_broken(timm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm_folder.write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    told = told_by("timm:resnet18")
    assert (
        "importing timm raised RuntimeError: operator torchvision::nms does not exist. timm imports torchvision" in told
    )
    timm_folder.unlink()
    monkeypatch.setattr(sys, "path", [])
    sys.path_importer_cache.pop(str(timm_folder.parent), None)
    assert "but timm is not installed. Install evenly[timm]" in told_by("timm:resnet18")
