"""Optimizers by name: the class and the settings that were asked for, or a sentence that says what to write."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from evenly.errors import SpecError
from evenly.recipes.optim import OPTIMIZERS, build_optimizer, catalogue
from evenly.recipes.optim.angulargrad import AngularGrad
from evenly.shards import Adafactor

HERE = [name for name, info in OPTIMIZERS.items() if info.extra is None]
EXTRA = [name for name, info in OPTIMIZERS.items() if info.extra is not None]


def parameters():
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))]


def test_the_published_optimizers_have_names():
    assert set(OPTIMIZERS) == {
        "sgd", "rmsprop", "adam", "adamw", "adafactor", "diffgrad", "adabelief", "angulargrad-cos", "angulargrad-tan"
    }  # fmt: skip
    assert all(info.summary for info in OPTIMIZERS.values())


@pytest.mark.parametrize("name", [*HERE, *(pytest.param(name, marks=pytest.mark.slow) for name in EXTRA)])
def test_each_is_built_with_its_usual_rate_and_all_its_options_exist(name):
    info = OPTIMIZERS[name]
    optimizer = build_optimizer(name, parameters(), weight_decay=0.01)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (info.lr, 0.01)
    assert type(optimizer).__name__ == info.callable
    assert build_optimizer(name, parameters(), lr=0.5).param_groups[0]["lr"] == 0.5
    assert set(info.options) <= set(group), "an option that the optimizer does not have"


@pytest.mark.parametrize(
    ("name", "kind", "arguments", "expected"),
    [
        ("sgd", torch.optim.SGD, {}, {"momentum": 0.9, "nesterov": False}),
        ("sgd", torch.optim.SGD, {"momentum": 0.5, "nesterov": True}, {"momentum": 0.5, "nesterov": True}),
        ("sgd", torch.optim.SGD, {"momentum": 0.0}, {"momentum": 0.0}),
        ("rmsprop", torch.optim.RMSprop, {}, {"momentum": 0}),
        ("rmsprop", torch.optim.RMSprop, {"momentum": 0.3, "alpha": 0.9}, {"momentum": 0.3, "alpha": 0.9}),
        ("adam", torch.optim.Adam, {"momentum": 0.8}, {"betas": (0.8, 0.999)}),
        ("adamw", torch.optim.AdamW, {"betas": [0.8, 0.95]}, {"betas": (0.8, 0.95)}),  # a list, as in TOML
        ("adafactor", Adafactor, {"d": 2.0}, {"d": 2.0}),
        ("angulargrad-cos", AngularGrad, {}, {"angle": "cos", "betas": (0.9, 0.999)}),
        ("angulargrad-tan", AngularGrad, {"momentum": 0.5}, {"angle": "tan", "betas": (0.5, 0.999)}),
    ],
)
def test_settings_reach_the_optimizer(name, kind, arguments, expected):
    optimizer = build_optimizer(name, parameters(), **arguments)
    assert type(optimizer) is kind
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected


def test_groups_of_parameters_keep_their_own_settings():
    weight, bias = parameters()
    groups = [{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = build_optimizer("angulargrad-cos", groups, lr=0.2, weight_decay=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_adafactor_is_torchs_on_whole_networks():
    ours, torchs = parameters(), parameters()
    optimizers = build_optimizer("adafactor", ours, weight_decay=0.1), torch.optim.Adafactor(torchs, weight_decay=0.1)
    for seed in range(4):
        for mine, other in zip(ours, torchs, strict=True):
            g = torch.Generator().manual_seed(seed)
            mine.grad = torch.randn(mine.shape, generator=g)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("agdam", {}, "the optimizer 'agdam' was asked for; .* Did you mean 'adam'"),
        ("xyzzy", {}, "Choose one of: sgd, rmsprop"),
        ("sgd", {"nestrov": True}, "option 'nestrov' was asked for of the optimizer 'sgd'; .* mean 'nesterov'"),
        ("adafactor", {"momentum": 0.9}, "momentum=0.9 was given to the optimizer 'adafactor', which has none"),
        ("adam", {"momentum": 0.9, "betas": (0.9, 0.99)}, "momentum is the first beta. Give one of them"),
        ("sgd", {"lr": -1.0}, "lr=-1.0.* SGD refuses that: Invalid learning rate"),
        ("sgd", {"momentum": 0.0, "nesterov": True}, "SGD refuses that: Nesterov momentum requires a momentum"),
        ("kfac", {}, "K-FAC is not here: no maintained library"),
        ("K-FAC", {}, "K-FAC is not here"),
    ],
)
def test_what_cannot_be_built_is_said_in_a_sentence(name, arguments, told):
    with pytest.raises(SpecError, match=told):
        build_optimizer(name, parameters(), **arguments)


def test_a_missing_library_is_told_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)  # as if it were not installed
    with pytest.raises(SpecError, match=r"comes from pytorch_optimizer, .* pip install 'evenly\[optim\]'"):
        build_optimizer("diffgrad", parameters())


def test_listing_needs_neither_torch_nor_the_library():
    code = "import sys, evenly.recipes.optim as o; print(*o.OPTIMIZERS, *o.SCHEDULES, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [*OPTIMIZERS, *catalogue.SCHEDULES, "False"], done.stderr
