"""`evenly report`: results of runs, side by side."""

from pathlib import Path
from typing import Annotated

import typer

from evenly.cli._completion import runs as runs_of


def report(
    runs: Annotated[list[Path], typer.Argument(autocompletion=runs_of, help="Run folders, or their run.jsonl files.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a run instead of a table.")] = False,
) -> None:
    """Print one row for each run: time, samples/s, MB across nodes, exchanges, accuracy.

    For a single run also print where the time of each rank went: computing, averaging inside its node, exchanges
    across nodes, waiting for slower ranks, other things; and, for a run with a plan that predicts, predicted and
    measured times.
    """
    from evenly.cli._show import open_console
    from evenly.cli.console import show_phases, show_rows
    from evenly.reports import read_row
    from evenly.spec import Run

    rows = [read_row(path) for path in runs]
    if json:
        from dataclasses import asdict
        from json import dumps

        for row in rows:
            print(dumps(asdict(row)))
        return
    console = open_console()
    show_rows(rows, console=console)
    if len(runs) == 1:
        show_phases(Run.read(runs[0]), console=console)
