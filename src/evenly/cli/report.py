"""`evenly report`: what runs came to, side by side."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from evenly.cli.console import show_rows
from evenly.reports import read_row


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or their run.jsonl files.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a run instead of a table.")] = False,
) -> None:
    """Print one row for each run: time, samples/s, MB across nodes, exchanges, accuracy."""
    rows = [read_row(path) for path in runs]
    if json:
        from dataclasses import asdict
        from json import dumps

        for row in rows:
            print(dumps(asdict(row)))
        return
    show_rows(rows, console=Console(highlight=False))
