"""Binds this process to cores of its own, then becomes a Python program: `python -m evenly.launch.bound ...`.

The arguments are those of `python`; a first argument `--threads` gives OpenMP as many threads as there are cores.
"""

import os
import sys

from evenly.errors import EvenlyError
from evenly.launch.binding import BOUND, bind_rank
from evenly.launch.find import find_place


def main() -> None:
    """Binds, and replaces this process: what the program starts stays on the same cores."""
    words = sys.argv[1:]
    try:
        cores = bind_rank(find_place())
    except EvenlyError as error:
        sys.stderr.write(f"evenly: {error}\n")
        sys.exit(1)
    os.environ[BOUND] = str(os.getpid())  # which stays
    if words[:1] == ["--threads"]:
        del words[0]
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
    os.execv(sys.executable, [sys.executable, "-u", *words])  # noqa: S606  # the program that was asked for


if __name__ == "__main__":
    main()
