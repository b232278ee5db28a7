"""The command line: one file per verb. Nothing here imports torch before a verb needs it."""

import atexit
import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from evenly import __version__
from evenly.cli import data, lab
from evenly.cli.coordinate import coordinate
from evenly.cli.discover import discover
from evenly.cli.doctor import doctor
from evenly.cli.experiment import experiment
from evenly.cli.export import export
from evenly.cli.join import join
from evenly.cli.launch import CONTEXT_SETTINGS, launch
from evenly.cli.measure import measure
from evenly.cli.plan import plan
from evenly.cli.predict import predict
from evenly.cli.report import report
from evenly.cli.simulate import simulate
from evenly.cli.train import train
from evenly.errors import EvenlyError
from evenly.launch.settings import environment
from evenly.launch.terminal import is_terminal

app = typer.Typer(
    name="evenly",
    help="Train one network on uneven machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("discover")(discover)
app.command("measure")(measure)
app.command("plan")(plan)
app.command("simulate")(simulate)
app.command("train")(train)
app.command("experiment")(experiment)
app.command("predict")(predict)
app.command("launch", context_settings=CONTEXT_SETTINGS)(launch)
app.command("join", context_settings=CONTEXT_SETTINGS)(join)
app.command("coordinate")(coordinate)
app.command("report")(report)
app.command("export")(export)
app.command("doctor")(doctor)
app.add_typer(data.app, name="data")
app.add_typer(lab.app, name="lab")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Runs the command line; an expected error is one message, not a traceback."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the program that started this one has closed it
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  # open until the process ends
    if not (is_terminal(sys.stdout) and is_terminal(sys.stderr)) and _may_force_colours():
        from typer import rich_utils

        rich_utils.FORCE_TERMINAL = False  # help and usage errors are plain text
    atexit.register(gc.freeze)  # no cycle collection at exit: with torch it takes most of a second
    try:
        app()
    except EvenlyError as error:
        print(f"evenly: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:  # a file or folder that cannot be used, and no caller said more about it
        reason = error.strerror or str(error) or type(error).__name__
        print(f"evenly: {reason}{f': {error.filename}' if error.filename else ''}.", file=sys.stderr)
        sys.exit(1)


def _may_force_colours() -> bool:
    """Returns whether typer would write escape codes into pipes and files; loading its help takes a while."""
    names = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")
    return sys.stdout.isatty() or sys.stderr.isatty() or any(map(environment, names))
