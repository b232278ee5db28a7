"""`evenly report`: results of runs, side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenly.cli._completion import runs as runs_of

if TYPE_CHECKING:
    from evenly.reports import RecordedRun


def report(
    runs: Annotated[list[Path], typer.Argument(autocompletion=runs_of, help="Run folders, or their run.jsonl files.")],
    html: Annotated[Path | None, typer.Option(help="Write a page with charts and a timeline to this file.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace of one run, for Perfetto or Chrome, to this file.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write all that ranks recorded to this file.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show a run that goes on until it ends; Ctrl-C stops showing it.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a run instead of a table.")] = False,
) -> None:
    """Print one row for each run: time, samples/s, MB across nodes, exchanges, accuracy.

    For a single run also print where the time of each rank went: computing, averaging inside its node, exchanges
    across nodes, waiting for slower ranks, other things; and, for a run with a plan that predicts, predicted and
    measured times.

    With `--html` all this and more is one page for a browser, which needs no network.
    """
    from evenly.cli._documents import require_own_files, require_writable
    from evenly.cli._show import open_console, say
    from evenly.cli.console import show_phases, show_rows
    from evenly.errors import SpecError
    from evenly.reports import read_recorded, row_of

    require_writable(html, trace, csv)
    require_own_files((html, trace, csv), runs)
    if trace is not None and len(runs) > 1:
        raise SpecError(f"--trace was given with {len(runs)} runs, but a trace shows one. Give one run.")
    if follow:
        _follow(runs)
    with_ranks = any(path is not None for path in (html, trace, csv))
    recorded, console = [read_recorded(path, with_ranks=with_ranks) for path in runs], open_console()
    if json:
        from dataclasses import asdict
        from json import dumps

        for one in recorded:
            print(dumps(asdict(row_of(one.run, name=one.name))))
    else:
        show_rows([row_of(one.run, name=one.name) for one in recorded], console=console)
        if len(recorded) == 1:
            show_phases(recorded[0].run, console=console)
    written = _write(recorded, html, trace, csv)
    if not json:
        say([f"wrote {path}" for path in written], console)
    problems = [problem for one in recorded for problem in one.problems]
    for problem in problems:
        print(f"evenly: {problem}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)


def _follow(runs: list[Path]) -> None:
    from evenly.cli._follow import follow, open_run
    from evenly.cli._show import open_console
    from evenly.errors import SpecError

    if len(runs) > 1:
        raise SpecError(f"--follow was given with {len(runs)} runs, but it shows one. Give one run.")
    console = open_console()
    try:
        follow(open_run(runs[0], console), console)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _write(runs: list[RecordedRun], html: Path | None, trace: Path | None, csv: Path | None) -> list[Path]:
    """Writes what was asked for, and returns the files."""
    if html is not None:
        from evenly.reports.page import write_page

        write_page(runs, html)
    if trace is not None:
        from evenly.reports.trace import write_trace

        write_trace(runs[0], trace)
    if csv is not None:
        from evenly.reports.rank_table import write_rank_table

        write_rank_table(runs, csv)
    return [path for path in (html, trace, csv) if path is not None]
