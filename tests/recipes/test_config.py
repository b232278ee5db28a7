"""Settings of a recipe: defaults, then a file, then key=value."""

from pathlib import Path

import pytest

from evenly.errors import SpecError
from evenly.recipes.fashion import FashionConfig


def build(*changes: str, file: Path | None = None) -> FashionConfig:
    return FashionConfig.build(file, changes)


def toml(folder: Path, text: str) -> Path:
    (folder / "settings.toml").write_text(text)
    return folder / "settings.toml"


def test_defaults_file_and_command_line_in_this_order(tmp_path):
    assert build() == FashionConfig()
    file = toml(tmp_path, 'epochs = 2\nlr = 0.5\nevery = 20\ncheckpoint_every = "epoch"\n')
    assert build(file=file) == FashionConfig(epochs=2, lr=0.5, every="20")
    assert build("epochs=7", "lr = 1", file=file) == FashionConfig(epochs=7, lr=1.0, every="20")


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
        (" width = 64 ", "width", 64),
    ],
)
def test_a_value_on_the_command_line(change, name, value):
    assert getattr(build(change), name) == value


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("epochs", r"--set 'epochs' .* takes key=value"),
        ("=3", r"--set '=3' .* takes key=value"),
        ("epoch=3", r"no setting 'epoch'. It has: epochs, batch_size, every"),
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
