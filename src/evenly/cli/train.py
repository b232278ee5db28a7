"""`evenly train`: a recipe on whatever launched it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenly.cli._completion import recipes, runs
from evenly.errors import SpecError
from evenly.launch.binding import bind_rank
from evenly.launch.find import find_place

if TYPE_CHECKING:
    from evenly.recipes.config import TrainConfig
    from evenly.spec import Event

OF_PLAN = (
    "every",
    "batch_size",
    "global_batch",
    "shares",
    "cut_batch",
    "overlap",
    "fragments",
    "codec",
    "outer",
    "optimizer_state",
)


def train(
    recipe: Annotated[
        str, typer.Argument(autocompletion=recipes, help="A recipe: what is trained, with which settings; see --list.")
    ] = "",
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: `epochs=3`, `network.width=8`. Repeatable."),
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Cut the layers: how much of each every rank of a node gets."),
    ] = None,
    sharing: Annotated[
        int | None, typer.Option(min=1, metavar="EPOCHS", help="Exchange between nodes after so many epochs.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--run",
            autocompletion=runs,
            help="Run folder: run.jsonl, results.csv and checkpoints. A run found there goes on.",
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data set's files; see `evenly data`.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not go on from a checkpoint in the run folder.")] = False,
    plan: Annotated[
        Path | None,
        typer.Option(help="A plan that `evenly plan` wrote: who computes what, the batch, and the period."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="cuda:0,cpu,...",
            help="The device of each rank of a node, or of all ranks, in their order; gpu:0 and cpu:0 too.",
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the figures for TensorBoard, too.")
    ] = None,
    bind: Annotated[
        bool,
        typer.Option("--bind", help="Bind every rank to cores of its own: its share of those of its machine."),
    ] = False,
    settings: Annotated[bool, typer.Option("--settings", help="List the recipe's settings and exit.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the recipes and exit.")] = False,
) -> None:
    """Train a recipe. Start it once per rank: by torchrun, srun, mpirun, `evenly launch`, `evenly lab run`, or alone.

    Examples: `evenly train fashion --set every=50 --set epochs=2 --run runs/first`;
    `evenly launch --nodes 2,1 -m evenly train fashion --set every=global`;
    `evenly launch --nodes 3 -m evenly train cifar --shares 70,25,5 --data data/cifar10`;
    `evenly launch --nodes 2,1 -m evenly train cifar --plan plan.json --data data/cifar10`;
    `srun --ntasks 3 evenly train cifar --shares 70,25,5 --devices cuda:0,cuda:1,cpu --data data/cifar10`.
    """
    from evenly.recipes.config import describe_recipe, load_config, recipe_names

    if listing:
        for name in recipe_names():
            print(f"{name}: {describe_recipe(name)}")
        return
    if not recipe:
        raise SpecError(f"no recipe was named. Choose one of: {', '.join(recipe_names())}; or see --list.")
    if plan is not None:
        _refuse_beside_plan(change or [], shares=shares, sharing=sharing)
    training_config = load_config(recipe, config, [*(change or []), *_changes(shares=shares, sharing=sharing)])
    if settings:
        _show_settings(training_config)
        return
    if bind:  # before torch, which starts a thread for each core it may use
        bind_rank(find_place())
    from evenly.cli._devices import device_of_this_rank
    from evenly.cli.console import Watcher
    from evenly.recipes.tasks.training import train as train_recipe
    from evenly.spec import Plan

    device = "auto" if devices is None else device_of_this_rank(devices)
    loaded_plan = None if plan is None else Plan.load(plan)
    watcher = Watcher(says_shared_devices=devices is not None)
    listeners: list[Callable[[Event], None]] = [watcher]
    if tensorboard is not None:
        from evenly.integrations.loggers import TensorBoardLogger

        listeners.append(TensorBoardLogger(tensorboard))
    try:
        train_recipe(
            training_config,
            folder=folder,
            data=data,
            resume=not fresh,
            listeners=listeners,
            plan=loaded_plan,
            device=device,
        )
    finally:
        watcher.close()


def _changes(*, shares: str | None, sharing: int | None) -> list[str]:
    """Returns the settings that options of their own stand for."""
    from evenly.cli._quantities import numbers_between_commas

    changes = [] if shares is None else [f"shares={numbers_between_commas(shares, '--shares')}"]
    return changes + ([] if sharing is None else [f"every={sharing} epochs"])


def _show_settings(config: "TrainConfig") -> None:
    for name, field in type(config).model_fields.items():
        print(f"{name} = {getattr(config, name)}" + (f"  ({field.description})" if field.description else ""))


def _refuse_beside_plan(changes: Sequence[str], *, shares: str | None, sharing: int | None) -> None:
    """Raises `SpecError` for settings that the plan already has."""
    options = {"shares": shares, "sharing": sharing}
    names = [
        *(change.partition("=")[0].strip() for change in changes),
        *(name for name, value in options.items() if value is not None),
    ]
    twice = [name for name in names if name in (*OF_PLAN, "sharing")]
    if twice:
        raise SpecError(
            f"{twice[0]} was given beside --plan, which has its own. Leave it out, or make a plan with it: evenly plan."
        )
