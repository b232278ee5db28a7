"""Settings of a recipe: defaults, then a file, then key=value."""

from pathlib import Path

import pytest

from evenly.errors import SpecError
from evenly.recipes.config import TrainConfig, load_config, recipe_names


def build(*changes: str, file: Path | None = None) -> TrainConfig:
    return load_config("fashion", file, changes)


def toml(folder: Path, text: str) -> Path:
    (folder / "settings.toml").write_text(text)
    return folder / "settings.toml"


def test_defaults_file_and_command_line_in_this_order(tmp_path):
    assert build().lr == 0.1
    file = toml(tmp_path, 'epochs = 2\nlr = 0.5\nevery = 20\ncheckpoint_every = "epoch"\n')
    assert build(file=file) == build("epochs=2", "lr=0.5", "every=20")
    assert build("epochs=7", "lr = 1", file=file) == build("epochs=7", "lr=1.0", "every=20")


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ("every=50", "every", "50"),
        ("every=global", "every", "global"),
        ('every="epoch"', "every", "epoch"),
        ("lr=1e-3", "lr", 1e-3),
        ("train_limit=none", "train_limit", None),
        ("train_limit=100", "train_limit", 100),
        ("checkpoint_every=25", "checkpoint_every", 25),
        ("checkpoint_every=None", "checkpoint_every", None),
        ("precision=bf16", "precision", "bf16"),
        (" data = mnist ", "data", "mnist"),
        ("network.width=64", "network", {"width": 64, "blocks": 1}),
        (" width = 64 ", "network", {"width": 64, "blocks": 1}),
        ("network={blocks = 2}", "network", {"width": 16, "blocks": 2}),
        ("augment=['crop','flip']", "augment", ("crop", "flip")),
        ("every=5 epochs", "every", "5 epochs"),
    ],
)
def test_a_value_on_the_command_line(change, name, value):
    assert getattr(build(change), name) == value


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("epochs", r"--set 'epochs' .* takes key=value"),
        ("=3", r"--set '=3' .* takes key=value"),
        ("epoch=3", r"no setting 'epoch'\. Did you mean 'epochs'\? There are: task, data"),
        ("lr.high=3", r"'lr.high' was given, but lr has no parts. Give lr=VALUE"),
        ("epochs=0", "epochs: .*given 0"),
        ("epochs=many", "epochs: .*given 'many'"),
        ("epochs=", "epochs: .*given ''"),
        ("lr=nan", "lr: .*given nan"),
        ("lr=-1", "lr: .*given -1"),
        ("momentum=1", "momentum: .*given 1"),
        ("every=1.5", "every: .*given 1.5"),
        ("precision=fp8", "precision: .*given 'fp8'"),
    ],
)
def test_a_wrong_change_is_refused(change, told):
    with pytest.raises(SpecError, match=told):
        build(change)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("epochs = \nlr = 1", "settings.toml is not valid TOML: .*line 1"),
        ("speed = 3", "no setting 'speed'"),
        ("[fashion]\nepochs = 3", "no setting 'fashion'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, told):
    with pytest.raises(SpecError, match=told):
        build(file=toml(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for file in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(SpecError, match=rf"settings file {file} cannot be read"):
            build(file=file)
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(SpecError, match="not valid TOML"):
        build(file=tmp_path / "bytes.toml")


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_is_valid(recipe):
    assert load_config(recipe).epochs >= 1


def test_an_unknown_recipe_is_refused_with_the_nearest_name():
    with pytest.raises(SpecError, match=r"'fashoin' was asked for, .*\. Did you mean 'fashion'\?"):
        load_config("fashoin")


def test_another_optimizer_network_or_schedule_begins_with_its_own_options():
    sgd = load_config("resnet")
    assert (sgd.optimizer_options, sgd.lr) == ({"nesterov": True}, 0.4)
    adam = load_config("resnet", changes=["optimizer=adam", "weight_decay=0.1"])
    assert (adam.optimizer_options, adam.lr, adam.momentum, adam.weight_decay) == ({}, None, None, 0.1)
    assert load_config("resnet", changes=["lr=0.2", "optimizer=adam"]).lr == 0.2
    assert load_config("resnet", changes=["optimizer=sgd"]) == sgd
    assert load_config("fashion", changes=["model=resnet20"]).network == {}
    assert load_config("resnet", changes=["schedule=cosine"]).schedule_options == {}
