"""How many threads each of several processes of this machine computes with."""

import os

from evenly.launch.settings import environment

VARIABLE = "OMP_NUM_THREADS"


def thread_variables(num_processes: int) -> dict[str, str]:
    """Returns the variable that gives each process an equal share of the cores; nothing if the user has set it."""
    if environment(VARIABLE) is not None:
        return {}
    return {VARIABLE: str(max(1, (os.cpu_count() or 1) // num_processes))}
