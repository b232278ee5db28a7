"""The TOML file of an experiment -> the runs that it asks for."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from evenly.errors import SpecError
from evenly.recipes.config import TrainConfig, load_config, parse_changes
from evenly.recipes.names import did_you_mean
from evenly.spec._text import load_toml
from evenly.spec._value import Value

GRIDS = Path(__file__).parent / "grids"
NOT_OF_NAMES = re.compile(r"[^A-Za-z0-9._]+")  # what the name of a folder does not take from a key
Cell = bool | int | float | str | tuple[int | float | str, ...]


class Experiment(Value):
    """What an experiment's file says."""

    recipe: Annotated[str, Field(description="whose settings all runs begin with")]
    metric: Annotated[str, Field(description="the figure by which runs are compared")] = "accuracy"
    better: Annotated[Literal["higher", "lower"], Field(description="which values of it are better")] = "higher"
    baseline: dict[str, Cell] = Field(
        default_factory=lambda: dict[str, Cell](every="global"),
        description="the cells of the grid that others are compared with",
    )
    seeds: Annotated[int, Field(ge=1, description="runs of each kind, with seeds 0, 1, ...")] = 3
    nodes: Annotated[str, Field(description="processes on each node, as `evenly launch` takes them")] = "1,1"
    settings: dict[str, object] = Field(default_factory=dict, description="of all runs, in place of the recipe's")
    quick: dict[str, object] = Field(
        default_factory=dict, description="settings of all runs with --quick: minutes on a CPU"
    )
    cases: dict[str, dict[str, dict[str, object]]] = Field(
        default_factory=dict,
        description="in each table named settings, of which a run takes one; all combinations of them",
    )
    grid: dict[str, tuple[Cell, ...]] = Field(
        default_factory=dict, description="values of settings, all combinations of them"
    )


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment."""

    cells: tuple[tuple[str, Cell], ...]  # what tells it from the others: its case and its place in the grid
    seed: int
    nodes: str
    changes: Mapping[str, object] = field(compare=False)  # settings in place of the recipe's
    config: TrainConfig = field(compare=False)

    @property
    def name(self) -> str:
        """The name of its folder, without the seed."""
        return "_".join(f"{NOT_OF_NAMES.sub('-', key)}-{_words(value)}" for key, value in self.cells) or "run"

    @property
    def folder(self) -> Path:
        """Its folder in that of the experiment."""
        return Path(self.name, f"seed-{self.seed}")

    @property
    def num_ranks(self) -> int:
        """How many ranks it starts."""
        return sum(int(count) for count in self.nodes.split(","))


def experiment_names() -> list[str]:
    """Returns the names of the experiments that come with evenly."""
    return sorted(file.stem for file in GRIDS.glob("*.toml"))


def describe_experiment(name: str) -> str:
    """Returns the first line of an experiment's file, which says what it compares."""
    return (GRIDS / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0].strip("# ")


def load_experiment(name: str) -> Experiment:
    """Returns the experiment of a name, or of a TOML file."""
    file = Path(name) if name.endswith(".toml") else GRIDS / f"{name}.toml"
    if not name.endswith(".toml") and name not in experiment_names():
        raise SpecError(
            f"the experiment {name!r} was asked for, but there is none.{did_you_mean(name, experiment_names())} "
            f"Choose one of: {', '.join(experiment_names())}; or give a TOML file."
        )
    values = load_toml(file)
    unknown = [key for key in values if key not in Experiment.model_fields]
    if unknown:
        raise SpecError(
            f"{file} has an entry {unknown[0]!r}, which no experiment has."
            f"{did_you_mean(unknown[0], Experiment.model_fields)} There are: {', '.join(Experiment.model_fields)}."
        )
    return Experiment(**values)


def planned_runs(
    experiment: Experiment,
    *,
    seeds: int | None = None,
    changes: Sequence[str] = (),
    only: Sequence[str] = (),
    quick: bool = False,
) -> list[PlannedRun]:
    """Returns the runs of an experiment, seed after seed, so that a part of them is already a comparison.

    Args:
        experiment: what is run.
        seeds: how many; the experiment's own number if left out.
        changes: settings of all runs, as texts like `epochs=3`.
        only: leaves out all runs but those that fit, as texts like `every=10,global`.
        quick: whether to take the experiment's settings for minutes on a CPU.
    """
    columns = columns_of(experiment)
    wanted = dict(_wanted(text, columns) for text in only)
    _require_columns(wanted, columns)
    overrides = {**(experiment.quick if quick else {}), **parse_changes(changes)}
    runs = [
        _planned(experiment, dict(zip(columns, combination, strict=True)), overrides, seed=seed)
        for seed in range(seeds or experiment.seeds)
        for combination in itertools.product(*columns.values())
    ]
    chosen = [run for run in runs if _fits(run, wanted)]
    if not chosen:
        raise SpecError(f"--only {' '.join(only)} was given, but no run of the experiment fits. Leave some of it out.")
    return chosen


def columns_of(experiment: Experiment) -> dict[str, tuple[Cell, ...]]:
    """Returns what runs differ in, and the values of each."""
    return {**{name: tuple(cases) for name, cases in experiment.cases.items()}, **experiment.grid}


def is_baseline(experiment: Experiment, run: PlannedRun) -> bool:
    """Returns whether others are compared with this run."""
    cells = dict(run.cells)
    return all(_words(cells.get(key, "")) == _words(value) for key, value in experiment.baseline.items())


def without_baseline_keys(experiment: Experiment, run: PlannedRun) -> tuple[tuple[str, Cell], ...]:
    """Returns what a run and its baseline have in common."""
    return tuple((key, value) for key, value in run.cells if key not in experiment.baseline)


def _planned(
    experiment: Experiment, cells: Mapping[str, Cell], overrides: Mapping[str, object], *, seed: int
) -> PlannedRun:
    changes = dict(experiment.settings)
    for name, cases in experiment.cases.items():
        changes |= cases[str(cells[name])]
    changes |= overrides
    changes |= {key: value for key, value in cells.items() if key not in experiment.cases}
    nodes = str(changes.pop("nodes", experiment.nodes))
    changes["seed"] = seed
    config = load_config(experiment.recipe).changed(changes)
    return PlannedRun(tuple(cells.items()), seed, nodes, changes, config)


def _wanted(text: str, columns: Mapping[str, tuple[Cell, ...]]) -> tuple[str, set[str]]:
    """Returns a key and the values that are wanted; a value that has a comma in it, such as 1,1, is given alone."""
    key, equals, values = text.partition("=")
    if values in {_text(value) for value in columns.get(key, ())}:
        return key, {values}
    if not equals or not key.strip():
        raise SpecError(f"--only {text!r} was given, but it takes KEY=VALUE,..., such as --only every=10,global.")
    return key.strip(), {value.strip() for value in values.split(",")}


def _require_columns(wanted: Mapping[str, set[str]], columns: Mapping[str, tuple[Cell, ...]]) -> None:
    known = {**{key: {_text(value) for value in values} for key, values in columns.items()}, "seed": None}
    for key, values in wanted.items():
        if key not in known:
            raise SpecError(
                f"--only {key}=... was given, but the runs do not differ in {key!r}.{did_you_mean(key, known)} "
                f"They differ in: {', '.join(known)}."
            )
        unknown = sorted(values - (known[key] or values))
        if unknown:
            raise SpecError(
                f"--only {key}={unknown[0]} was given, but {key} is one of: {', '.join(sorted(known[key] or ()))}."
            )


def _fits(run: PlannedRun, wanted: Mapping[str, set[str]]) -> bool:
    cells = {**{key: _text(value) for key, value in run.cells}, "seed": str(run.seed)}
    return all(cells[key] in values for key, values in wanted.items())


def _text(value: Cell) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _words(value: Cell) -> str:
    """Returns a value as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", _text(value)).strip("-") or "none"
