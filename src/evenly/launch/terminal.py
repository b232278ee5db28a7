"""Whether a person reads the output of this process at a terminal."""

from typing import TextIO

from evenly.launch.find import LAUNCHERS
from evenly.launch.launchers.launcher import Environ
from evenly.launch.settings import whole_environment


def is_terminal(stream: TextIO, environ: Environ | None = None) -> bool:
    """Returns whether `stream` is a terminal of its own, which may get colours and progress bars.

    mpirun gives its ranks pseudo terminals and forwards what they write to its own output, which may be a file and has
    the lines of all ranks. Whether it is a terminal cannot be seen from a rank.
    """
    if not stream.isatty():
        return False
    variables = whole_environment() if environ is None else environ
    return not any(launcher.forwards_output and launcher.detects(variables) for launcher in LAUNCHERS)
