"""Scripts and commands run in a process that has torch imported already: see `tests.processes`."""

import io
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from typer.testing import CliRunner


def run_script(script: str, words: Sequence[Sequence[str]], folder: str) -> str:
    """Returns what `python SCRIPT WORDS` prints in this folder, for each of `words` in turn."""
    os.chdir(folder)
    sys.path.insert(0, str(Path(script).resolve().parent))
    with redirect_stdout(io.StringIO()) as said:
        for given in words:
            sys.argv = [script, *given]
            runpy.run_path(script, run_name="__main__")
    return said.getvalue()


def run_command(words: Sequence[str], environment: dict[str, str]) -> str:
    """Returns what `evenly WORDS` prints; it must end well."""
    from evenly.cli import app

    os.environ.update(environment)
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None:
        raise done.exception
    return done.output
