"""`evenly train`: a published recipe on whatever launched it."""

from pathlib import Path
from typing import Annotated

import typer

from evenly._errors import SpecError

RECIPES = {"fashion": "a small ResNet on Fashion-MNIST"}


def train(
    recipe: Annotated[str, typer.Argument(help="; ".join(f"{name}: {text}" for name, text in RECIPES.items()))],
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--run", help="Run folder: run.jsonl and checkpoints. A run found there goes on.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data set's files.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not go on from a checkpoint in the run folder.")] = False,
    settings: Annotated[bool, typer.Option("--settings", help="List the recipe's settings and exit.")] = False,
) -> None:
    """Train a recipe. Start it once per rank: by torchrun, srun, mpirun, `evenly launch`, `evenly lab run`, or alone.

    Examples: `evenly train fashion --set every=50 --set epochs=2 --run runs/first`;
    `evenly launch --nodes 2,1 -m evenly train fashion --set every=global`.
    """
    if recipe not in RECIPES:
        raise SpecError(f"there is no recipe {recipe!r}. Choose one of: {', '.join(RECIPES)}.")
    from evenly.recipes.fashion import FashionConfig, train_fashion

    if settings:
        for name, field in FashionConfig.model_fields.items():
            print(f"{name} = {field.default}" + (f"  ({field.description})" if field.description else ""))
        return
    from evenly.cli.console import Watcher

    watcher = Watcher()
    try:
        train_fashion(
            FashionConfig.build(config, change or []), folder=folder, data=data, resume=not fresh, listener=watcher
        )
    finally:
        watcher.close()
