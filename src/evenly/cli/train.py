"""`evenly train`: a published recipe on whatever launched it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenly.cli._completion import recipes, runs
from evenly.errors import SpecError
from evenly.launch.binding import bind_rank
from evenly.launch.find import find_place

if TYPE_CHECKING:
    from evenly.recipes.config import RecipeConfig

RECIPES = {
    "fashion": "a small ResNet on Fashion-MNIST",
    "cifar": "the published 8-convolution net on CIFAR-10, its layers cut in --shares",
    "mnist": "the published convolution net on MNIST, its layers cut in --shares",
}

OF_PLAN = ("every", "batch_size", "shares", "cut_batch", "overlap", "fragments", "codec", "outer", "optimizer_state")


def train(
    recipe: Annotated[
        str, typer.Argument(autocompletion=recipes, help="; ".join(f"{name}: {text}" for name, text in RECIPES.items()))
    ],
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="cifar, mnist: how much of every layer each rank of a node gets."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--run", autocompletion=runs, help="Run folder: run.jsonl and checkpoints. A run found there goes on."
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data set's files.")] = None,
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
    bind: Annotated[
        bool,
        typer.Option("--bind", help="Bind every rank to cores of its own: its share of those of its machine."),
    ] = False,
    settings: Annotated[bool, typer.Option("--settings", help="List the recipe's settings and exit.")] = False,
) -> None:
    """Train a recipe. Start it once per rank: by torchrun, srun, mpirun, `evenly launch`, `evenly lab run`, or alone.

    Examples: `evenly train fashion --set every=50 --set epochs=2 --run runs/first`;
    `evenly launch --nodes 2,1 -m evenly train fashion --set every=global`;
    `evenly launch --nodes 3 -m evenly train cifar --shares 70,25,5 --data data/cifar10`;
    `evenly launch --nodes 2,1 -m evenly train cifar --plan plan.json --data data/cifar10`;
    `srun --ntasks 3 evenly train cifar --shares 70,25,5 --devices cuda:0,cuda:1,cpu --data data/cifar10`.
    """
    if recipe not in RECIPES:
        raise SpecError(f"there is no recipe {recipe!r}. Choose one of: {', '.join(RECIPES)}.")
    if bind:  # before torch, which starts a thread for each core it may use
        bind_rank(find_place())
    from evenly.cli._devices import device_of_this_rank
    from evenly.cli._quantities import numbers_between_commas

    kind, run = _recipe(recipe)
    if shares is not None and "shares" not in kind.model_fields:
        raise SpecError(f"--shares was given, but the recipe {recipe!r} does not cut layers. Use cifar or mnist.")
    if plan is not None:
        _refuse_beside_plan(change or [], shares)
    changes = [
        *(change or []),
        *([f"shares={numbers_between_commas(shares, '--shares')}"] if shares is not None else []),
    ]
    if settings:
        for name, field in kind.model_fields.items():
            print(f"{name} = {field.default}" + (f"  ({field.description})" if field.description else ""))
        return
    from evenly.cli.console import Watcher
    from evenly.spec import Plan

    device = "auto" if devices is None else device_of_this_rank(devices)
    loaded_plan = None if plan is None else Plan.load(plan)
    watcher = Watcher(says_shared_devices=devices is not None)
    try:
        recipe_config = kind.build(config, changes)
        run(
            recipe_config,
            folder=folder,
            data=data,
            resume=not fresh,
            listener=watcher,
            plan=loaded_plan,
            device=device,
        )
    finally:
        watcher.close()


def _refuse_beside_plan(changes: list[str], shares: str | None) -> None:
    """Raises `SpecError` for settings that the plan already has."""
    names = [*(change.partition("=")[0].strip() for change in changes), *(["shares"] if shares is not None else [])]
    twice = [name for name in names if name in OF_PLAN]
    if twice:
        raise SpecError(
            f"{twice[0]} was given beside --plan, which has its own. Leave it out, or make a plan with it: evenly plan."
        )


def _recipe(name: str) -> tuple[type["RecipeConfig"], Callable[..., float]]:
    """Returns the settings and the training of a recipe."""
    if name == "fashion":
        from evenly.recipes.fashion import FashionConfig, train_fashion

        return FashionConfig, train_fashion
    from evenly.recipes.shares import SharesConfig, train_shares

    return SharesConfig, partial(train_shares, case=name)
