"""The settings of a training: defaults, a recipe, a TOML file, `key=value` on the command line, in this order."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from evenly.errors import SpecError
from evenly.recipes.names import did_you_mean
from evenly.spec._text import load_toml
from evenly.spec._value import Value
from evenly.spec.exchange import StatePolicy
from evenly.spec.layout import check_shares

RECIPES = Path(__file__).parent / "settings"  # one TOML file each
DEPENDENT = {  # settings, and those that have another meaning with another value of them
    "model": ("network",),
    "optimizer": ("optimizer_options", "lr", "momentum"),
    "schedule": ("schedule_options",),
}
Option = bool | int | float | str | tuple[int | float | str, ...] | None
Options = dict[str, Option]


class TrainConfig(Value):
    """What can be set for a training."""

    task: Annotated[
        Literal["classification", "gan", "language"], Field(description="classification, gan or language")
    ] = "classification"
    data: Annotated[str, Field(description="a data set: see `evenly data`")] = "fashion"
    image_size: Annotated[
        int | None, Field(ge=8, description="side of the images of a folder; none: the usual one of the data set")
    ] = None
    context: Annotated[int, Field(ge=1, description="language: characters that the network sees")] = 128
    augment: Annotated[
        tuple[str, ...], Field(description="of training images: crop, flip, randaugment, autoaugment, mixup")
    ] = ()
    skip_unreadable: Annotated[bool, Field(description="leave out images that cannot be read")] = False
    train_limit: Annotated[int | None, Field(ge=1, description="use only the first samples")] = None
    test_limit: Annotated[int | None, Field(ge=1, description="test with only the first samples")] = None

    model: Annotated[
        str, Field(description="a network: its name, package.module:function, path/file.py:function or timm:NAME")
    ] = "small-resnet"
    network: Options = Field(default_factory=dict, description="options of the network, such as network.width=32")
    pretrained: Annotated[
        str | None, Field(description="a file of weights to begin with; layers of other shapes begin anew")
    ] = None

    epochs: Annotated[int, Field(ge=1, description="passes over the data")] = 3
    batch_size: Annotated[int, Field(ge=1, description="samples of one rank in a step, or of one cut network")] = 32
    global_batch: Annotated[
        int | None, Field(ge=1, description="samples of all ranks in a step, in equal parts; in place of batch_size")
    ] = None
    optimizer: Annotated[str, Field(description="sgd, adam, angulargrad-cos, ...: see the documentation")] = "sgd"
    optimizer_options: Options = Field(default_factory=dict, description="such as optimizer_options.nesterov=true")
    lr: Annotated[float | None, Field(gt=0, description="highest learning rate; none: the optimizer's usual one")] = (
        None
    )
    momentum: Annotated[float | None, Field(ge=0, lt=1, description="none: the optimizer's usual one")] = None
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    schedule: Annotated[str, Field(description="of the learning rate: none, step, multistep, cosine or one-cycle")] = (
        "none"
    )
    schedule_options: Options = Field(default_factory=dict, description="such as schedule_options.milestones=[30,60]")
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    precision: Annotated[Literal["fp32", "bf16"], Field(description="fp32, or bf16: autocast")] = "fp32"
    channels_last: Annotated[bool, Field(description="keep images and weights in that memory format")] = False
    compiled: Annotated[bool, Field(description="compile the network by torch.compile")] = False

    every: Annotated[
        str, Field(description="K': a number of steps, '30s', '2%' of the time, 'epoch', '5 epochs' or 'global'")
    ] = "epoch"
    overlap: Annotated[int, Field(ge=0, description="steps made during an exchange")] = 0
    fragments: Annotated[int, Field(ge=1, description="parts of the parameters, exchanged one by one")] = 1
    codec: Annotated[str, Field(description="format of what exchanges send: fp32, bf16, int8 or int4")] = "fp32"
    outer: Annotated[Literal["nesterov"] | None, Field(description="nesterov, or none: plain averaging")] = None
    optimizer_state: Annotated[StatePolicy, Field(description="keep, average or reset momenta")] = "keep"
    shares: Annotated[
        tuple[float, ...], Field(description="cut layers: the share of each rank of a node, such as [70,25,5]")
    ] = ()
    cut_batch: Annotated[bool, Field(description="cut early layers along the batch where that sends fewer bytes")] = (
        False
    )

    evaluate_every: Annotated[int, Field(ge=0, description="epochs; 0: only at the end")] = 1
    checkpoint_every: Annotated[int | Literal["epoch"] | None, Field(description="steps, 'epoch', or none")] = "epoch"
    seed: Annotated[int, Field(description="of weights, of the order of samples and of augmentation")] = 0

    @field_validator("shares", mode="after")
    @classmethod
    def _are_shares(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        return check_shares(shares) if shares else shares

    @field_validator("every", mode="before")
    @classmethod
    def _is_text(cls, every: object) -> object:
        return str(every) if isinstance(every, int) and not isinstance(every, bool) else every

    def changed(self, values: Mapping[str, object]) -> "TrainConfig":
        """Returns the settings with others in place of some; keys are like those of `--set`."""
        return TrainConfig(**merged(self.model_dump(), values))


def recipe_names() -> list[str]:
    """Returns the names of the recipes that come with evenly."""
    return sorted(file.stem for file in RECIPES.glob("*.toml"))


def describe_recipe(name: str) -> str:
    """Returns the first line of a recipe's file, which says what it trains."""
    return (RECIPES / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0].strip("# ")


def load_config(recipe: str, file: Path | None = None, changes: Sequence[str] = ()) -> TrainConfig:
    """Returns the settings of a recipe, changed by a TOML `file` and then by texts like `epochs=3`."""
    if recipe not in recipe_names():
        raise SpecError(
            f"the recipe {recipe!r} was asked for, but there is none.{did_you_mean(recipe, recipe_names())} "
            f"Choose one of: {', '.join(recipe_names())}."
        )
    values: dict[str, object] = merged({}, load_toml(RECIPES / f"{recipe}.toml"))
    if file is not None:
        values = merged(values, load_toml(file))
    return TrainConfig(**merged(values, parse_changes(changes)))


def parse_changes(changes: Iterable[str]) -> dict[str, object]:
    """Returns the settings that texts like `epochs=3` and `network.width=8` name."""
    values: dict[str, object] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise SpecError(f"--set {change!r} was given, but it takes key=value, such as --set epochs=3.")
        values[key.strip()] = _value(text.strip())
    return values


def merged(values: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Returns `values` with `changes`: a dotted key or a table changes single options; unknown keys are refused.

    An option of the network that `values` has can be named without `network.` before it. What belongs to a network,
    optimizer or schedule begins anew with another one.
    """
    result = dict(values)
    for name, dependent in DEPENDENT.items():
        if name in changes and changes[name] != values.get(name, TrainConfig.model_fields[name].default):
            result = {key: value for key, value in result.items() if key not in dependent}
    for change, value in changes.items():
        key = f"network.{change}" if change in _table(result.get("network")) else change
        name, dot, option = key.partition(".")
        _require_setting(name, key)
        _require_small(key, value)
        before = result.get(name) or {}
        if dot:
            result[name] = {**_table(before), option: value}
        elif isinstance(value, Mapping):
            result[name] = {**_table(before), **value}
        else:
            result[name] = value
    return result


def _table(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, Mapping) else {}


def _require_setting(name: str, key: str) -> None:
    if name not in TrainConfig.model_fields:
        raise SpecError(
            f"{key!r} was given, but there is no setting {name!r}.{did_you_mean(name, TrainConfig.model_fields)} "
            f"There are: {', '.join(TrainConfig.model_fields)}."
        )
    if key != name and TrainConfig.model_fields[name].default_factory is None:
        raise SpecError(f"the setting {key!r} was given, but {name} has no parts. Give {name}=VALUE.")


def _require_small(key: str, value: object) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise SpecError(
            f"the setting {key} was given a number of {len(str(abs(value)))} digits; whole numbers lie between "
            "-2^63 and 2^63. Give a smaller one."
        )


def _value(text: str) -> object:
    if text.lower() in ("none", "null"):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, thousands of digits, or nested without end
        return text
